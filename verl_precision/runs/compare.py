"""A comparison from end to end: checks, one run a precision, table, figure, files."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from verl_precision.errors import ConfigurationError
from verl_precision.presets import preset_names
from verl_precision.runs.figures import write_comparison
from verl_precision.runs.fork_server import fork_server_on_cpu
from verl_precision.runs.launch import Progress, run_verl
from verl_precision.runs.page import page, write_page
from verl_precision.runs.read import read_runs
from verl_precision.runs.results import PassBar, Summary, summarise, table, write_summary
from verl_precision.versions import installed_versions


def compare_precisions(
    config: Path,
    precisions: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    console: Console,
    pass_bar: PassBar | None = None,
) -> list[Summary]:
    """Run a recipe once in each precision and write the comparison.

    Args:
        config: The recipe's YAML.
        precisions: Names of precision presets, in the order to run.
        overrides: Hydra overrides for every run.
        folder: Folder of all results; must not exist.
        console: Where progress and the table are shown.
        pass_bar: What each run is judged by.

    Returns:
        One summary a precision.

    Raises:
        ConfigurationError: If the preset is unknown, the recipe is missing or the folder exists; nothing has started.
        RunFailedError: If a run fails; finished runs stay in `folder`.
    """
    _check_arguments(config, precisions, folder)
    seconds: dict[str, float] = {}
    with fork_server_on_cpu() as python:
        for precision in precisions:
            chosen = [*overrides, f"precision={precision}"]
            with _shown(precision, console) as on_progress:
                seconds[precision] = run_verl(config, chosen, folder / precision, on_progress, python)
            # After each run, so that an interrupted comparison leaves what it had.
            runs = read_runs([folder / name for name in seconds])
            rows = {name: run.rows for name, run in zip(seconds, runs, strict=True)}
            summaries = [summarise(name, rows[name], seconds[name]) for name in rows]
            verdicts = {name: pass_bar.verdict(rows[name]) for name in rows} if pass_bar else None
            write_summary(folder / "summary.json", summaries, sys.argv, installed_versions(), verdicts)
            write_comparison(folder / "comparison.png", runs, title=config.stem)
            write_page(folder / "report.html", page(runs), force=True)
    console.print(table(summaries))
    if pass_bar:
        for name in rows:
            console.print(pass_bar.sentence(name, rows[name]), highlight=False)
    for what, name in (("figure", "comparison.png"), ("report", "report.html"), ("summary", "summary.json")):
        console.print(f"{what:8} {folder / name}", highlight=False, soft_wrap=True)
    console.print(f"metrics  {folder}/<precision>/metrics.jsonl, log train.log", highlight=False, soft_wrap=True)
    return summaries


def _check_arguments(config: Path, precisions: Sequence[str], folder: Path) -> None:
    if not config.is_file():
        raise ConfigurationError(
            f"{config}: there is no such recipe",
            remedy="Give the YAML itself, e.g. recipes/quickstart/quickstart.yaml, from the repository's root.",
        )
    known = preset_names("precision")
    if unknown := [precision for precision in precisions if precision not in known]:
        raise ConfigurationError(
            "there is no such preset", setting="--precision", value=unknown[0], allowed=", ".join(known)
        )
    if len(set(precisions)) != len(precisions):
        given = " ".join(precisions)
        raise ConfigurationError("one is given twice", setting="--precision", value=given, allowed="each preset once")
    if folder.exists():
        raise ConfigurationError(
            f"{folder} exists, and nothing is overwritten", remedy="Wait a second, or give another --output."
        )


@contextmanager
def _shown(precision: str, console: Console) -> Iterator[Callable[[Progress], None]]:
    """Show a run's progress: a live bar on a terminal, one line a stage or step elsewhere."""
    live = console.is_terminal
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bars = Bars(SpinnerColumn(), TextColumn(f"[bold]{precision}[/]"), *columns, console=console)
    task, last = bars.add_task("starting verl", total=None), ""

    def show(progress: Progress) -> None:
        nonlocal last
        total = progress.total_steps
        bars.update(task, description=progress.stage, completed=progress.step, total=total)
        text = f"step {progress.step}/{total or '?'}" if progress.step else progress.stage
        if text != last and not live:
            console.print(f"[{progress.seconds:5.0f} s] {precision}: {text}", markup=False, highlight=False)
        last = text

    with bars if live else nullcontext():
        yield show
