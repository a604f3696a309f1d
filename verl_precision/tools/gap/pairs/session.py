"""A job from end to end: what is missing is sampled and scored, then table and figures are written."""

import sys
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from verl_precision.base.files import write_file
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import Prompt, find_model, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.pairs.figures import write_figures
from verl_precision.tools.gap.pairs.measure import Pair, measure
from verl_precision.tools.gap.pairs.settings import MismatchJob, check_model
from verl_precision.tools.gap.pairs.table import markdown, summary
from verl_precision.tools.jobs.journal import open_journal
from verl_precision.tools.jobs.store import Series, Store
from verl_precision.tools.jobs.work import complete, start_engine
from verl_precision.tools.show.tables import write_json


def measure_mismatch(
    job: MismatchJob,
    prompts: list[Prompt],
    folder: Path,
    console: Console,
    ray_address: str | None = None,
    in_flight: int = 256,
) -> list[Pair]:
    """Do what is missing in the folder, and write the results.

    Args:
        job: What is measured.
        prompts: The prompts, as read.
        folder: A new or empty folder, or that of an earlier job with the same settings.
        console: Where progress and table are shown.
        ray_address: Address of a Ray cluster whose GPUs share the work; None for this machine.
        in_flight: Responses sampled or scored together, by each engine.

    Returns:
        One entry for each pair of dtypes.

    Raises:
        ConfigurationError: If something cannot work; it is raised before a model loads.
        RunFailedError: If an engine fails; what was done is kept.
    """
    model = find_model(job.model)
    prompt_ids = tokenize(prompts, model)
    longest = max(map(len, prompt_ids))
    check_model(job, model, longest)
    recorded = {
        **asdict(job),
        "model_fingerprint": model.fingerprint,
        **{f"version of {name}": version for name, version in installed_versions().items()},
        "prompt_token_ids": prompt_ids,
    }
    with closing(open_journal(folder, recorded)) as journal:
        store = Store(journal, job, prompt_ids)
        journal.show_resumed(store.count, console)

        def fill(name: str, build: partial, series: list[Series]) -> None:
            complete(series, lambda: start_engine(build, name, folder, ray_address), in_flight, console)

        for rollout in job.rollout_dtypes:
            sampler = partial(VllmEngine, job.model, rollout, longest + job.max_response_tokens, log_probs=True)
            fill(f"sample-{rollout}", sampler, [Series(store, rollout)])
        for train in job.train_dtypes:
            scorer = partial(TrainerEngine, job.model, train, job.attention, job.micro_batch_tokens)
            fill(f"score-{train}", scorer, [Series(store, rollout, train) for rollout in job.rollout_dtypes])
        pairs = [measure(store, rollout, train) for rollout, train in job.pairs]
    _write(folder, pairs, job, len(prompts), console)
    return pairs


def _write(folder: Path, pairs: list[Pair], job: MismatchJob, prompts: int, console: Console) -> None:
    table = markdown(pairs, job, installed_versions(), prompts)
    write_file(folder / "table.md", table, replace=True)
    write_json(folder / "summary.json", summary(pairs, job, installed_versions(), prompts, sys.argv))
    figures = write_figures(folder, pairs, title=Path(job.model).name)
    console.print(Markdown(table))
    names = ", ".join(["table.md", "summary.json", *figures])
    console.print(f"wrote {names} to {folder}", highlight=False, soft_wrap=True)
