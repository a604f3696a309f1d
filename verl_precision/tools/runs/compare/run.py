"""A comparison from end to end: checks, the runs of its grid, progress and results on the terminal."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from verl_precision.base.errors import RunFailedError
from verl_precision.base.overrides import quoted
from verl_precision.tools.runs.compare.folder import SUMMARY
from verl_precision.tools.runs.compare.outputs import FIGURE, REPORT, Results
from verl_precision.tools.runs.compare.summary import PassBar, Summary, table
from verl_precision.tools.runs.grid import PlannedRun
from verl_precision.tools.runs.launch import Progress, run_verl


def compare_runs(
    config: Path,
    runs: Sequence[PlannedRun],
    overrides: Sequence[str],
    folder: Path,
    console: Console,
    pass_bar: PassBar | None = None,
    parallel: int = 1,
) -> list[Summary]:
    """Run a recipe once for each arm and seed, so many in parallel, each with a Ray of its own; write the comparison.

    Runs that the folder's summary has are not repeated; one that is there goes on from its last checkpoint.

    If a run fails, no other starts, those under way go on to their end, and finished runs stay in the folder.
    Ctrl-C is raised after every process of every run has ended.
    """
    results = Results(config, runs, overrides, folder, pass_bar)
    todo = [run for run in runs if run.name not in results.finished()]
    # Threads of two runs on one core wait for each other actively, at several times the work.
    threads = max(1, (os.cpu_count() or 1) // parallel) if parallel > 1 else None
    failed, interrupted = threading.Event(), threading.Event()
    board = _Board(console, len(runs), len(runs) - len(todo), interrupted)

    def start(run: PlannedRun) -> None:
        if failed.is_set():
            return
        checkpoints = folder / run.name / "checkpoints"
        chosen = [*overrides, *run.overrides, f"trainer.default_local_dir={quoted(checkpoints)}"]
        checkpoints.mkdir(parents=True, exist_ok=True)  # whose they are is written into it: run_identity.py
        with board.run(run.name) as show:
            try:
                results.add(run, run_verl(config, chosen, folder / run.name, show, True, threads))
            except BaseException:
                failed.set()
                raise

    errors: list[BaseException] = []
    with board.shown(), ThreadPoolExecutor(parallel) as pool:
        try:
            futures = {pool.submit(start, run): run for run in todo}
            for handled, future in enumerate(as_completed(futures), start=1):
                if (error := future.exception()) is not None:
                    errors.append(error)
                    if any(other.running() for other in futures):
                        text = f"{futures[future].name} has failed; what is under way goes on, then the reason is shown"
                        console.print(text, highlight=False, soft_wrap=True)
                # After each run, so that an interrupted comparison leaves what it had.
                if handled == sum(other.done() for other in futures):
                    results.draw()
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise errors[0] if len(errors) == 1 else RunFailedError("\n".join(map(str, errors)))
    results.draw()
    _show(results, console)
    return results.summaries()


def _show(results: Results, console: Console) -> None:
    console.print(table(results.summaries()))
    if results.pass_bar:
        for name, run in results.finished().items():
            console.print(results.pass_bar.sentence(name, run.rows), highlight=False)
    names = {"figure": FIGURE, "report": REPORT, "summary": SUMMARY}
    lines = [f"{what:8} {results.folder / name}" for what, name in names.items()]
    folder = "<precision>" if all(run.arm.name == run.arm.precision for run in results.runs) else "<arm>"
    folder += "/seed_<n>" if any(run.seed is not None for run in results.runs) else ""
    lines.append(f"metrics  {results.folder}/{folder}/metrics.jsonl, log train.log")
    lines.append(f"which cause makes a run's gap: verl-precision explain --run {results.folder}/{folder}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


class _Board:
    """How far the runs are, from any thread: live bars on a terminal, one line a stage or step elsewhere."""

    def __init__(self, console: Console, runs: int, done: int, interrupted: threading.Event) -> None:
        self._console, self._interrupted = console, interrupted
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bars = Bars(SpinnerColumn(), TextColumn("[bold]{task.fields[name]}[/]"), *columns, console=console)
        self._all = self._bars.add_task("runs are finished", total=runs, completed=done, name="all", visible=runs > 1)

    def shown(self) -> AbstractContextManager[object]:
        """Show the bars meanwhile, on a terminal."""
        return self._bars if self._console.is_terminal else nullcontext()

    @contextmanager
    def run(self, name: str) -> Iterator[Callable[[Progress], None]]:
        """Show a run meanwhile; yield what is to be called with its progress."""
        live = self._console.is_terminal
        task, last, text = self._bars.add_task("starting verl", total=None, name=name), Progress("", 0, None, 0.0), ""

        def show(progress: Progress) -> None:
            nonlocal last, text
            if self._interrupted.is_set():
                raise KeyboardInterrupt  # Ctrl-C reaches the main thread only; here, it ends the run's processes
            total = progress.total_steps
            self._bars.update(task, description=progress.stage, completed=progress.step, total=total)
            former, text = text, f"step {progress.step}/{total or '?'}" if progress.step else progress.stage
            if text != former and not live:
                self._say(progress, f"{name}: {text}")
            last = progress

        try:
            yield show
        finally:
            self._bars.remove_task(task)  # a line takes less room than a bar
        self._bars.advance(self._all)
        if live:
            self._say(last, f"{name}: finished, {text}")

    def _say(self, progress: Progress, text: str) -> None:
        self._console.print(f"[{progress.seconds:5.0f} s] {text}", markup=False, highlight=False)
