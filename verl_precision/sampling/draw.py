"""The loop of every job: ask for what is missing, wait, write it down, count it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from verl_precision.sampling.engine import Engine, Request, Response
from verl_precision.sampling.engine_process import EngineProcess

Key = tuple[str, int]  # (problem, index of the response)


def work_through(
    engine: Engine,
    next_requests: Callable[[int], Sequence[Request]],
    record: Callable[[Response], None],
    finished: Callable[[], bool],
    in_flight: int,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Ask an engine until all is finished; what is still in flight then is left unfinished.

    Args:
        engine: Answers.
        next_requests: Returns up to so many requests, each once.
        record: Writes a response to the journal, then counts it.
        finished: Says whether nothing more is needed.
        in_flight: Responses in flight for each engine; enough to keep it full.
        on_progress: Called after each batch of responses.
    """
    asked = 0
    while not finished():
        wanted = next_requests(in_flight * engine.engines - asked)
        if wanted:
            engine.submit(wanted)
        responses = engine.poll()
        for response in responses:
            record(response)
        asked += len(wanted) - len(responses)
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
