"""One engine on each GPU of a Ray cluster, as actors; each is kept full on its own."""

from collections.abc import Callable, Sequence
from typing import Any

from verl_precision.errors import EnvironmentMismatchError, RunFailedError
from verl_precision.sampling.engine import Engine, Request, Response


class RayEngines:
    """Spreads requests over engines: each request goes to the one with the fewest in flight."""

    def __init__(self, build: Callable[[], Engine], address: str, engines: int | None, gpus_each: int = 1) -> None:
        """Start the engines and wait until all are ready.

        Args:
            build: Makes one engine, in its own process.
            address: Address of the Ray cluster; `local` starts one.
            engines: Number of engines; None for as many as the cluster's GPUs allow.
            gpus_each: GPUs of one engine.

        Raises:
            EnvironmentMismatchError: If no such cluster answers, or it cannot hold the engines.
            RunFailedError: If an engine cannot be made.
        """
        import ray

        self._ray = ray
        self._actors: list[Any] = []
        self._polls: dict[Any, int] = {}
        self._started_here = not ray.is_initialized()
        if self._started_here:
            try:
                ray.init(address=address, log_to_driver=False)
            except (ConnectionError, ValueError) as error:
                raise EnvironmentMismatchError(
                    f"--ray-address {address}: no Ray cluster answers there ({error}). Allowed: auto, local, or "
                    "host:port of a running cluster. Start one with `ray start --head`, or leave --ray-address out."
                ) from error
        try:
            gpus = ray.cluster_resources().get("GPU", 0)
            self.engines = engines_that_fit(gpus, gpus_each, engines)
            actor = ray.remote(num_gpus=gpus_each, num_cpus=1)(_Actor)
            self._actors = [actor.remote(build) for _ in range(self.engines)]
            self._in_flight = [0] * self.engines
            self._get([actor.ready.remote() for actor in self._actors])
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engines."""
        for index, share in enumerate(spread(requests, self._in_flight)):
            if share:
                self._actors[index].submit.remote(share)
                self._in_flight[index] += len(share)

    def poll(self) -> list[Response]:
        """Wait until some engine has a response ready; return what all have.

        Raises:
            RunFailedError: If an engine fails.
        """
        for index, actor in enumerate(self._actors):
            if self._in_flight[index] and index not in self._polls.values():
                self._polls[actor.poll.remote()] = index
        if not self._polls:
            return []
        done, _ = self._ray.wait(list(self._polls), num_returns=1)
        ready: list[Response] = []
        for future in done:
            responses = self._get(future)
            self._in_flight[self._polls.pop(future)] -= len(responses)
            ready += responses
        return ready

    def close(self) -> None:
        """End the engines, and Ray if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_here:
            self._ray.shutdown()

    def _get(self, futures: Any) -> Any:
        try:
            return self._ray.get(futures)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise RunFailedError(
                f"an engine on Ray failed; what is done is kept, and the same command continues.\n"
                f"  {type(cause).__name__}: {cause}"
            ) from error


class _Actor:
    """What runs in an actor: an engine, built there."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._engine = build()

    def ready(self) -> None:
        """Answer once the model is loaded."""

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def poll(self) -> list[Response]:
        return self._engine.poll()


def spread(requests: Sequence[Request], in_flight: Sequence[int]) -> list[list[Request]]:
    """Divide requests among engines that have `in_flight` ones each, so that they come out evenly loaded."""
    load = list(in_flight)
    shares: list[list[Request]] = [[] for _ in load]
    for request in requests:
        index = load.index(min(load))
        load[index] += 1
        shares[index].append(request)
    return shares


def engines_that_fit(gpus: float, gpus_each: int, wanted: int | None) -> int:
    """Return how many engines of `gpus_each` to start; with None wanted, all that fit.

    Raises:
        EnvironmentMismatchError: If that many, or a single one, do not fit.
    """
    fit = int(gpus // gpus_each)
    if fit < 1 or (wanted is not None and wanted > fit):
        raise EnvironmentMismatchError(
            f"--engines {wanted or 'all'}: Ray's cluster has {gpus:g} GPU(s), enough for {fit} engine(s) of "
            f"{gpus_each}. Allowed: 1 to {max(fit, 1)}. Give another --engines or --ray-address, or leave "
            "--ray-address out to run one engine here."
        )
    return fit if wanted is None else wanted
