"""Progress: a live bar on a terminal, a line for each tenth elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_REFRESH_SECONDS = 0.5


@contextmanager
def shown(
    total: int, done: Callable[[], int], text: Callable[[], str], console: Console
) -> Iterator[Callable[[], None]]:
    """Show how much is done; yield the function to call after each batch of responses.

    Args:
        total: What there is to do.
        done: Returns how much of it is done; called often.
        text: Returns the rest in words; called seldom.
        console: Where it is shown.
    """
    if not console.is_terminal:
        tenth = [-1]

        def line() -> None:
            if done() * 10 // total != tenth[0]:
                tenth[0] = done() * 10 // total
                console.print(f"{done()}/{total} {text()}", highlight=False)

        line()
        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task, moved_at = bar.add_task(text(), total=total, completed=done()), [monotonic()]

        def move() -> None:
            if done() == total or monotonic() - moved_at[0] > _REFRESH_SECONDS:
                moved_at[0] = monotonic()
                bar.update(task, completed=done(), description=text())

        yield move
