"""How far the runs of a comparison are: live bars on a terminal, one line a stage or step elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from verl_precision.tools.runs.launch import Progress


class Board:
    """Shows runs that are under way, several at a time, from any thread.

    Args:
        console: Where it is shown.
        runs: Number of runs of the comparison.
        done: Number of those that are finished already.
    """

    def __init__(self, console: Console, runs: int, done: int) -> None:
        """See the class."""
        self._console = console
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bars = Bars(SpinnerColumn(), TextColumn("[bold]{task.fields[name]}[/]"), *columns, console=console)
        self._all = self._bars.add_task("runs are finished", total=runs, completed=done, name="all", visible=runs > 1)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bars meanwhile, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._bars:
            yield

    @contextmanager
    def run(self, name: str) -> Iterator[Callable[[Progress], None]]:
        """Show a run meanwhile; yield what is to be called with its progress."""
        live = self._console.is_terminal
        task, last, text = self._bars.add_task("starting verl", total=None, name=name), Progress("", 0, None, 0.0), ""

        def show(progress: Progress) -> None:
            nonlocal last, text
            total = progress.total_steps
            self._bars.update(task, description=progress.stage, completed=progress.step, total=total)
            former, text = text, f"step {progress.step}/{total or '?'}" if progress.step else progress.stage
            if text != former and not live:
                self._say(progress, f"{name}: {text}")
            last = progress

        try:
            yield show
        except BaseException:
            self._bars.remove_task(task)
            raise
        self._bars.remove_task(task)  # a line takes less room than a bar
        self._bars.advance(self._all)
        if live:
            self._say(last, f"{name}: finished, {text}")

    def _say(self, progress: Progress, text: str) -> None:
        self._console.print(f"[{progress.seconds:5.0f} s] {text}", markup=False, highlight=False)
