"""A comparison from end to end: checks, one run a precision, table, figure, files."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from verl_precision.runs.pass_bar import PassBar
from verl_precision.runs.read import read_runs
from verl_precision.runs.results import Summary, read_metrics, summarise, table, write_summary
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
        config: the recipe's YAML.
        precisions: names of precision presets, in the order to run.
        overrides: Hydra overrides for every run.
        folder: receives everything; must not exist.
        console: where progress and the table are shown.
        pass_bar: what to judge each run by.

    Returns:
        One summary a precision.

    Raises:
        ConfigurationError: unknown preset, missing recipe, or existing folder, before anything starts.
        RunFailedError: when a run fails; finished runs stay in `folder`.
    """
    _check_arguments(config, precisions, folder)
    runs: dict[str, list[dict[str, float]]] = {}
    summaries: list[Summary] = []
    with fork_server_on_cpu() as fork_server:
        for precision in precisions:
            chosen = [*overrides, f"precision={precision}"]
            with _shown(precision, console) as on_progress:
                seconds = run_verl(config, chosen, folder / precision, on_progress, fork_server)
            runs[precision] = read_metrics(folder / precision / "metrics.jsonl")
            summaries.append(summarise(precision, runs[precision], seconds))
            # After each run, so that an interrupted comparison leaves what it had.
            verdicts = {name: pass_bar.verdict(rows) for name, rows in runs.items()} if pass_bar else None
            write_summary(folder / "summary.json", summaries, sys.argv, installed_versions(), verdicts)
            recorded = read_runs([folder / name for name in runs])
            write_comparison(folder / "comparison.png", recorded, title=config.stem)
            write_page(folder / "report.html", page(recorded), force=True)
    console.print(table(summaries))
    if pass_bar:
        for name, rows in runs.items():
            console.print(pass_bar.sentence(name, rows), highlight=False)
    for what, name in (("figure", "comparison.png"), ("report", "report.html"), ("summary", "summary.json")):
        console.print(f"{what:8} {folder / name}", highlight=False, soft_wrap=True)
    console.print(f"metrics  {folder}/<precision>/metrics.jsonl, log train.log", highlight=False, soft_wrap=True)
    return summaries


def _check_arguments(config: Path, precisions: Sequence[str], folder: Path) -> None:
    if not config.is_file():
        raise ConfigurationError(
            f"{config}: no such recipe",
            remedy="Give the YAML itself, e.g. recipes/quickstart/quickstart.yaml, from the repository's root.",
        )
    allowed = preset_names("precision")
    for precision in precisions:
        if precision not in allowed:
            raise ConfigurationError(
                "no such preset", setting="--precision", value=precision, allowed=", ".join(allowed)
            )
    if len(set(precisions)) != len(precisions):
        raise ConfigurationError(setting="--precision", value=" ".join(precisions), allowed="each preset once")
    if folder.exists():
        raise ConfigurationError(
            f"{folder} exists, and nothing is overwritten", remedy="Wait a second, or give --output."
        )


@contextmanager
def _shown(precision: str, console: Console) -> Iterator[Callable[[Progress], None]]:
    """Show a run's progress: a live bar on a terminal, one line a stage or step elsewhere."""
    if not console.is_terminal:
        yield _lines(precision, console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[precision]}[/]"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bars(*columns, console=console) as bars:
        task = bars.add_task("starting verl", precision=precision, total=None)
        yield lambda progress: bars.update(
            task, description=progress.stage, completed=progress.step, total=progress.total_steps
        )


def _lines(precision: str, console: Console) -> Callable[[Progress], None]:
    last: list[str] = [""]

    def show(progress: Progress) -> None:
        total = "?" if progress.total_steps is None else progress.total_steps
        text = f"step {progress.step}/{total}" if progress.step else progress.stage
        if text != last[0]:
            last[0] = text
            console.print(f"[{progress.seconds:5.0f} s] {precision}: {text}", markup=False, highlight=False)

    return show
