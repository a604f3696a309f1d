"""An analysis from end to end: what is missing is sampled and scored, then table and figures are written."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verl_precision.check import versions
from verl_precision.offline.figures import write_figures
from verl_precision.offline.measure import Pair, measure
from verl_precision.offline.plan import Work, all_work, missing, responses_asked, responses_done
from verl_precision.offline.prompts import Prompt, tokenised
from verl_precision.offline.settings import OfflineSettings, check_model, described_model, load_tokenizer
from verl_precision.offline.store import Store, create_or_resume, write_whole
from verl_precision.offline.table import console_table, markdown, summary
from verl_precision.offline.work import run_here, run_on_ray


def analyse(
    settings: OfflineSettings, prompts: list[Prompt], folder: Path, console: Console, ray_address: str | None = None
) -> list[Pair]:
    """Do what is missing in the folder, and write the results.

    Args:
        settings: what is measured.
        prompts: as read.
        folder: new, empty, or of an earlier run with the same settings.
        console: where progress and table are shown.
        ray_address: of a Ray cluster whose GPUs share the work; None works here.

    Returns:
        One entry a pair of dtypes.

    Raises:
        ConfigurationError: before a model loads, for what cannot work.
        RunFailedError: when a process fails; what was done is kept.
    """
    description = described_model(settings.model)
    prompt_ids = tokenised(prompts, load_tokenizer(settings.model))
    check_model(settings, description, max(map(len, prompt_ids)))
    store = create_or_resume(folder.resolve(), settings, prompt_ids, versions())
    for kind in ("sample", "score"):
        _do(store, all_work(store, kind), console, ray_address)
    pairs = [measure(store, rollout, train) for rollout, train in settings.pairs]
    count = len(prompt_ids)
    write_whole(folder / "table.md", markdown(pairs, settings, versions(), count))
    write_whole(folder / "summary.json", summary(pairs, settings, versions(), count, sys.argv))
    figures = write_figures(folder, pairs, title=Path(settings.model).name)
    console.print(console_table(pairs))
    for name, path in (("table", folder / "table.md"), ("summary", folder / "summary.json")):
        console.print(f"{name:8} {path}", highlight=False, soft_wrap=True)
    console.print(f"figures  {folder}/: {', '.join(path.name for path in figures)}", highlight=False, soft_wrap=True)
    return pairs


def _do(store: Store, works: list[Work], console: Console, ray_address: str | None) -> None:
    left = [part for work in works if (part := missing(store, work))]
    with _shown(store, works, console) as on_poll:
        if left and ray_address is not None:
            run_on_ray(ray_address, store.folder, left, on_poll)
        else:
            run_here(store.folder, left, on_poll)
        on_poll()


@contextmanager
def _shown(store: Store, works: list[Work], console: Console) -> Iterator[Callable[[], None]]:
    """Show responses done: a live bar on a terminal, a line whenever the number changes elsewhere."""
    total = sum(responses_asked(store, work) for work in works)

    def state() -> tuple[int, str]:
        left = [work.dtype for work in works if missing(store, work)]
        done = sum(responses_done(store, work) for work in works)
        return done, works[0].kind + (f", still in {', '.join(left)}" if left else "d")

    if not console.is_terminal:
        last: list[int] = []

        def line() -> None:
            done, text = state()
            if last != [done]:
                console.print(f"{text}: {done}/{total} responses", highlight=False)
                last[:] = [done]

        line()
        yield line
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=total)

        def update() -> None:
            done, text = state()
            bars.update(task, completed=done, description=text)

        update()
        yield update
