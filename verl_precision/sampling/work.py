"""The loop of every job: ask for what is missing, wait, write it down, show how far it is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_precision.sampling.engine import Engine, Request, Response
from verl_precision.sampling.engine_process import EngineProcess

Key = tuple[str, int]  # (problem, index of the response)

_REFRESH_SECONDS = 0.5


class Work(Protocol):
    """What a job has to do, and how much of it is done."""

    total: int

    @property
    def done(self) -> int:
        """How much is done; the work is finished when this is `total`."""

    def next_requests(self, limit: int) -> Sequence[Request]:
        """Return up to so many requests, each once."""

    def record(self, response: Response) -> None:
        """Write a response to the journal, then count it."""

    def progress(self) -> str:
        """Say in words what `done` counts."""


def work_through(engine: Engine, work: Work, in_flight: int, console: Console) -> None:
    """Ask an engine until the work is finished; what is still in flight then is left unfinished.

    Args:
        engine: Answers.
        work: What to ask.
        in_flight: Responses in flight for each engine; enough to keep it full.
        console: Where progress is shown.
    """
    asked = 0
    with _progress(work, console) as show:
        while work.done < work.total:
            wanted = work.next_requests(in_flight * engine.engines - asked)
            if wanted:
                engine.submit(wanted)
            responses = engine.poll()
            for response in responses:
                work.record(response)
            asked += len(wanted) - len(responses)
            show()


@contextmanager
def _progress(work: Work, console: Console) -> Iterator[Callable[[], None]]:
    """Show a live bar on a terminal and a line for each tenth elsewhere; yield the function that moves it."""
    if not console.is_terminal:
        shown = -1

        def print_line() -> None:
            nonlocal shown
            if (tenth := work.done * 10 // work.total) != shown:
                shown = tenth
                console.print(f"{work.done}/{work.total} {work.progress()}", highlight=False)

        print_line()
        yield print_line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task, moved_at = bar.add_task(work.progress(), total=work.total, completed=work.done), monotonic()

        def move_bar() -> None:
            nonlocal moved_at
            if work.done == work.total or monotonic() - moved_at > _REFRESH_SECONDS:
                moved_at = monotonic()
                bar.update(task, completed=work.done, description=work.progress())

        yield move_bar


def start_engine(
    build: partial, name: str, folder: Path, ray_address: str | None, engines: int | None = None
) -> Engine:
    """Start one engine on this machine, or one on each GPU of a Ray cluster.

    Args:
        build: Makes an engine.
        name: What the engine does, for its log and for messages.
        folder: Folder of the job; logs go to `logs` in it.
        ray_address: Address of the Ray cluster; None for this machine.
        engines: Number of engines on Ray; None for all that fit.
    """
    if ray_address is None:
        return EngineProcess(build, name, folder / "logs")
    from verl_precision.sampling.ray_engines import RayEngines

    return RayEngines(build, ray_address, engines)
