"""A job from end to end: what is missing is sampled and scored, then table and figures are written."""

from functools import partial
from pathlib import Path

from rich.console import Console

from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import find_model
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.pairs.figures import write_figures
from verl_precision.tools.gap.pairs.measure import Pair, measure
from verl_precision.tools.gap.pairs.settings import MismatchJob
from verl_precision.tools.gap.pairs.table import markdown, summary
from verl_precision.tools.jobs.frame import Frame
from verl_precision.tools.jobs.problems import prompt_tokens
from verl_precision.tools.jobs.store import Series, open_store


def measure_mismatch(job: MismatchJob, console: Console) -> list[Pair]:
    """Do what is missing in the job's folder, and write the results.

    Args:
        job: What is measured.
        console: Where progress and table are shown.

    Returns:
        One entry for each pair of dtypes.

    Raises:
        ConfigurationError: If something cannot work; it is raised before a model loads.
        RunFailedError: If an engine fails; what was done is kept.
    """
    frame, model = Frame(job, console), find_model(job.model)
    model.require_dtypes("--rollout-dtype", job.rollout_dtypes)
    prompt_ids = prompt_tokens(job, model, model, job.max_response_tokens)
    length = max(map(len, prompt_ids)) + job.max_response_tokens
    with open_store(frame, job, prompt_ids, model_fingerprint=model.fingerprint) as store:
        for rollout in job.rollout_dtypes:
            sampler = partial(VllmEngine, job.model, rollout, length, log_probs=True)
            frame.complete(f"sample-{rollout}", [Series(store, rollout)], sampler)
        for train in job.train_dtypes:
            scorer = partial(TrainerEngine, job.model, train, job.attention, job.micro_batch_tokens)
            works = [Series(store, rollout, train) for rollout in job.rollout_dtypes]
            frame.complete(f"score-{train}", works, scorer)
        pairs = [measure(store, rollout, train) for rollout, train in job.pairs]
    frame.write(summary(pairs, len(prompt_ids)), markdown(pairs, job, installed_versions(), len(prompt_ids)))
    figures = write_figures(job.folder, pairs, title=Path(job.model).name)
    frame.show_written(["table.md", "summary.json", *figures])
    return pairs
