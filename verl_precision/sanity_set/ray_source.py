"""Many engines, one a GPU, as Ray actors; each is kept full on its own."""

from collections.abc import Callable, Sequence
from typing import Any

from verl_precision.errors import EnvironmentMismatchError
from verl_precision.sanity_set.source import Request, Response, Source


class RaySource:
    """Spreads requests over engines: each request goes to the one with the fewest in flight."""

    def __init__(self, build: Callable[[], Source], address: str, engines: int | None, gpus_each: int = 1) -> None:
        """Start the engines and wait until all are ready.

        Args:
            build: makes one engine, in its own process.
            address: of the Ray cluster; `local` starts one.
            engines: how many; None for as many as the cluster's GPUs allow.
            gpus_each: of Ray's GPU resource.

        Raises:
            EnvironmentMismatchError: if the cluster cannot hold them.
        """
        import ray

        self._ray = ray
        self._started_here = not ray.is_initialized()
        if self._started_here:
            ray.init(address=address, log_to_driver=False)
        self._count = engines_that_fit(ray.cluster_resources().get("GPU", 0), gpus_each, engines)
        actor = ray.remote(num_gpus=gpus_each, num_cpus=1)(_Engine)
        self._actors = [actor.remote(build) for _ in range(self._count)]
        self._in_flight = [0] * self._count
        self._polls: dict[Any, int] = {}
        ray.get([engine.ready.remote() for engine in self._actors])

    @property
    def engines(self) -> int:
        """How many there are."""
        return self._count

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engines."""
        for index, share in enumerate(spread(requests, self._in_flight)):
            if share:
                self._actors[index].submit.remote(share)
                self._in_flight[index] += len(share)

    def poll(self) -> list[Response]:
        """Wait until some engine has a response ready; return what all have."""
        for index, engine in enumerate(self._actors):
            if self._in_flight[index] and index not in self._polls.values():
                self._polls[engine.poll.remote()] = index
        if not self._polls:
            return []
        done, _ = self._ray.wait(list(self._polls), num_returns=1)
        ready: list[Response] = []
        for future in done:
            responses = self._ray.get(future)
            self._in_flight[self._polls.pop(future)] -= len(responses)
            ready += responses
        return ready

    def close(self) -> None:
        """End the engines, and Ray if it was started here."""
        for engine in self._actors:
            self._ray.kill(engine)
        if self._started_here:
            self._ray.shutdown()


class _Engine:
    """What runs in an actor: a source, built there."""

    def __init__(self, build: Callable[[], Source]) -> None:
        self._source = build()

    def ready(self) -> None:
        """Answer once the model is loaded."""

    def submit(self, requests: Sequence[Request]) -> None:
        self._source.submit(requests)

    def poll(self) -> list[Response]:
        return self._source.poll()


def spread(requests: Sequence[Request], in_flight: Sequence[int]) -> list[list[Request]]:
    """Divide requests so that the engines come out as evenly loaded as can be.

    Args:
        requests: to divide, in order.
        in_flight: requests each engine has already.

    Returns:
        One list an engine.
    """
    load = list(in_flight)
    shares: list[list[Request]] = [[] for _ in load]
    for request in requests:
        index = load.index(min(load))
        load[index] += 1
        shares[index].append(request)
    return shares


def engines_that_fit(gpus: float, gpus_each: int, wanted: int | None) -> int:
    """Return how many engines to start.

    Args:
        gpus: of the cluster.
        gpus_each: each takes.
        wanted: None for all that fit.

    Raises:
        EnvironmentMismatchError: if that many, or a single one, do not fit.
    """
    fit = int(gpus // gpus_each)
    if fit < 1 or (wanted is not None and wanted > fit):
        raise EnvironmentMismatchError(
            f"--engines {wanted or 'all'}: Ray's cluster has {gpus:g} GPU(s), enough for {fit} engine(s) of "
            f"{gpus_each}. Allowed: 1 to {max(fit, 1)}. Give another --engines or --ray-address, or leave "
            "--ray-address out to run one engine here."
        )
    return fit if wanted is None else wanted
