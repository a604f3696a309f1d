"""A job from end to end: what is missing is sampled and scored, then table and figures are written."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console

from verl_precision.files import write_file
from verl_precision.integration.fsdp_scorer import TrainerEngine
from verl_precision.integration.vllm_sampler import VllmEngine
from verl_precision.offline_mismatch.figures import write_figures
from verl_precision.offline_mismatch.measure import Pair, measure
from verl_precision.offline_mismatch.settings import MismatchJob, check_model
from verl_precision.offline_mismatch.store import Store
from verl_precision.offline_mismatch.table import console_table, markdown, summary
from verl_precision.sampling.draw import start_engine, work_through
from verl_precision.sampling.engine import Engine, Request
from verl_precision.sampling.journal import open_journal
from verl_precision.sampling.model import Prompt, find_model, tokenize
from verl_precision.sampling.progress import shown
from verl_precision.versions import installed_versions


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
    check_model(job, model, max(map(len, prompt_ids)))
    recorded = {
        **asdict(job),
        "model_fingerprint": model.fingerprint,
        **{f"version of {name}": version for name, version in installed_versions().items()},
        "prompt_token_ids": prompt_ids,
    }
    with closing(open_journal(folder, recorded)) as journal:
        store = Store(journal, job, prompt_ids)
        length = max(map(len, prompt_ids)) + job.max_response_tokens

        def fill(rollouts: tuple[str, ...], train: str | None, build: partial) -> None:
            name = f"sample-{rollouts[0]}" if train is None else f"score-{train}"
            start = partial(start_engine, build, name, folder, ray_address)
            _fill(store, rollouts, train, start, in_flight, console)

        for rollout in job.rollout_dtypes:
            fill((rollout,), None, partial(VllmEngine, job.model, rollout, length, log_probs=True))
        for train in job.train_dtypes:
            trainer = partial(TrainerEngine, job.model, train, job.attention, job.micro_batch_tokens)
            fill(job.rollout_dtypes, train, trainer)
        pairs = [measure(store, rollout, train) for rollout, train in job.pairs]
        _write(folder, pairs, job, len(prompts), console)
    return pairs


def _fill(
    store: Store,
    rollouts: tuple[str, ...],
    train: str | None,
    start: Callable[[], Engine],
    in_flight: int,
    console: Console,
) -> None:
    """Sample in a rollout dtype, or score what was sampled in a train dtype; one model serves all of it."""
    what = f"responses sampled in {rollouts[0]}" if train is None else f"responses scored in {train}"
    progress = shown(
        len(rollouts) * len(store.keys),
        lambda: sum(store.count(rollout, train) for rollout in rollouts),
        lambda: what,
        console,
    )
    with progress as on_progress:
        left = {rollout: keys for rollout in rollouts if (keys := store.missing(rollout, train))}
        if not left:
            return
        with closing(start()) as engine:
            for rollout, keys in left.items():
                requests = (store.request(rollout, train, *key) for key in keys)
                work_through(
                    engine,
                    partial(_first, requests),
                    partial(store.add, rollout, train),
                    partial(store.complete, rollout, train),
                    in_flight,
                    on_progress,
                )


def _first(requests: Iterator[Request], limit: int) -> list[Request]:
    return list(islice(requests, limit))


def _write(folder: Path, pairs: list[Pair], job: MismatchJob, prompts: int, console: Console) -> None:
    write_file(folder / "table.md", markdown(pairs, job, installed_versions(), prompts), replace=True)
    write_file(folder / "summary.json", summary(pairs, job, installed_versions(), prompts, sys.argv), replace=True)
    figures = write_figures(folder, pairs, title=Path(job.model).name)
    console.print(console_table(pairs))
    for name, path in (("table", folder / "table.md"), ("summary", folder / "summary.json")):
        console.print(f"{name:8} {path}", highlight=False, soft_wrap=True)
    console.print(f"figures  {folder}/: {', '.join(path.name for path in figures)}", highlight=False, soft_wrap=True)
