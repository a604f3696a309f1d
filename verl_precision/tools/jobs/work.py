"""The loop of every job: ask for what is missing, wait, write it down, show how far it is."""

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from itertools import islice
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl_precision.tools.engines.engine import Engine, Request, Response

_SECONDS_BETWEEN_UPDATES = 0.5
Key = tuple[str, int]  # (problem, index of the response)


class Work(Protocol):
    """What a job has to do, and how much of it is done."""

    total: int

    @property
    def in_flight(self) -> int | None:
        """Responses in flight for each engine; None for the job's number."""

    @property
    def done(self) -> int:
        """How much is done; the work is finished when this is `total`."""

    def next_requests(self, limit: int) -> Sequence[Request]:
        """Return up to so many requests, each once."""

    def record(self, response: Response) -> None:
        """Write a response to the journal, then count it."""

    def progress(self) -> str:
        """Say in words what `done` counts."""


class FixedWork(Work):
    """`Work` whose responses are known from the start: each that is missing is asked for once, in their order."""

    in_flight: int | None = None

    def __init__(self, words: str, keys: Sequence[Key], finished: Collection[Key]) -> None:
        """Begin with what is finished, to which `record` adds; `words` say what `done` counts."""
        self._words, self.total = words, len(keys)
        self.missing = [key for key in keys if key not in finished]
        self._finished = finished
        self._unasked = iter(self.missing)

    @property
    def done(self) -> int:
        """Number of responses that are finished."""
        return len(self._finished)

    def next_requests(self, limit: int) -> list[Request]:
        """Return up to so many requests, each once."""
        return [self._request(*key) for key in islice(self._unasked, limit)]

    @abstractmethod
    def _request(self, problem: str, response: int) -> Request: ...

    def progress(self) -> str:
        """Say in words what `done` counts."""
        return self._words


def complete(works: Sequence[Work], start: Callable[[], Engine], in_flight: int, console: Console) -> None:
    """Finish works one after the other on one engine, which starts only if one of them is unfinished."""
    unfinished = [work for work in works if work.done < work.total]
    if unfinished:
        with closing(start()) as engine:
            for work in unfinished:
                work_through(engine, work, work.in_flight or in_flight, console)


def work_through(engine: Engine, work: Work, in_flight: int, console: Console) -> None:
    """Ask an engine until the work is finished; what is still in flight then is left unfinished.

    `in_flight` responses for each engine keep it full. Progress is a live bar on a terminal, a line for each tenth
    elsewhere.
    """
    asked, tenth, due = 0, -1, 0.0
    left = TimeRemainingColumn(elapsed_when_finished=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), left)
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=work.total)
        while True:
            if time.monotonic() >= due or work.done == work.total:  # the words of a large job take a while to make
                bar.update(task, completed=work.done, description=work.progress())
                due = time.monotonic() + _SECONDS_BETWEEN_UPDATES
            if not console.is_terminal and work.done * 10 // work.total > tenth:
                tenth = work.done * 10 // work.total
                console.print(f"{work.done}/{work.total} {work.progress()}", highlight=False)
            if work.done == work.total:
                return
            wanted = work.next_requests(in_flight * engine.engines - asked)
            if wanted:
                engine.submit(wanted)
            responses = engine.poll()
            for response in responses:
                work.record(response)
            asked += len(wanted) - len(responses)
