"""The loop of every job: ask for what is missing, wait, write it down, count it."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from verl_precision.sampling.engine import Engine, Request, Response
from verl_precision.sampling.engine_process import EngineProcess

Key = tuple[str, int]  # (problem, index of the response)


class Plan(Protocol):
    """Which responses to do next."""

    in_flight: int

    @property
    def finished(self) -> bool:
        """Whether nothing more is needed."""

    def next_requests(self, limit: int) -> list[Key]:
        """Hand out up to `limit` responses to do."""


class EachOnce:
    """The plan that asks for every response once, in order."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """Start with nothing done.

        Args:
            keys: Responses to do.
        """
        self._waiting = deque(keys)
        self.in_flight = 0

    @property
    def finished(self) -> bool:
        """Whether every response is back."""
        return not self._waiting and not self.in_flight

    def next_requests(self, limit: int) -> list[Key]:
        """Hand out up to `limit` responses."""
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self.in_flight += len(taken)
        return taken

    def done(self) -> None:
        """Count a response as back."""
        self.in_flight -= 1


def work_through(
    plan: Plan,
    engine: Engine,
    request: Callable[[str, int], Request],
    record: Callable[[Response], None],
    in_flight: int,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Do what a plan asks for until it is finished; what is still in flight then is left unfinished.

    Args:
        plan: Says what to do next.
        engine: Does it.
        request: Makes the request of (problem, index of the response).
        record: Writes a response to the journal, then counts it in the plan.
        in_flight: Responses in flight for each engine; enough to keep it full.
        on_progress: Called after each batch of responses.
    """
    while not plan.finished:
        wanted = plan.next_requests(in_flight * engine.engines - plan.in_flight)
        if wanted:
            engine.submit([request(*key) for key in wanted])
        for response in engine.poll():
            record(response)
        on_progress()


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
