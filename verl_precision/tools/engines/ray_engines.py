"""One engine on each GPU of a Ray cluster, as actors; each is kept full on its own."""

import signal
from collections.abc import Callable, Sequence
from typing import Any

from verl_precision.base.errors import EnvironmentMismatchError, RunFailedError
from verl_precision.tools.engines.engine import Request, Response


class RayEngines:
    """Spreads requests over engines; every method raises `RunFailedError` if one fails."""

    def __init__(self, build: Callable[[], Any], address: str) -> None:
        """Start the engines and wait until all are ready; the address `local` starts a cluster."""
        import ray

        self._ray, self._started_here = ray, not ray.is_initialized()
        self._actors: list[Any] = []
        self._polls: dict[Any, int] = {}  # answer to come -> index of its engine
        if self._started_here:
            heard = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(address=address, log_to_driver=False)
                signal.signal(signal.SIGTERM, heard)  # Ray sets a handler of its own
            except (ConnectionError, ValueError) as error:
                problem = f"--ray-address {address}: no Ray cluster answers there ({error})"
                allowed = "auto, local, or host:port of a running cluster"
                remedy = "Start one with `ray start --head`, or leave --ray-address out."
                raise EnvironmentMismatchError(problem, allowed=allowed, remedy=remedy) from error
        try:
            gpus = ray.cluster_resources().get("GPU", 0)
            if gpus < 1:
                problem = f"Ray's cluster has {gpus:g} GPU(s), and each engine takes one"
                remedy = "Give another --ray-address, or leave it out to run one engine here."
                raise EnvironmentMismatchError(problem, remedy=remedy)
            self.engines = int(gpus)
            actor = ray.remote(num_gpus=1, num_cpus=1)(_Actor)
            self._actors = [actor.remote(build) for _ in range(self.engines)]
            self._in_flight = [0] * self.engines
            self._get([actor.ready.remote() for actor in self._actors])
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand each request to the engine with the fewest in flight."""
        shares: list[list[Request]] = [[] for _ in self._actors]
        for request in requests:
            index = min(range(self.engines), key=self._in_flight.__getitem__)
            shares[index].append(request)
            self._in_flight[index] += 1
        for actor, share in zip(self._actors, shares, strict=True):
            actor.submit.remote(share)

    def poll(self) -> list[Response]:
        """Wait until some engine has a response ready; return what it has."""
        for index, actor in enumerate(self._actors):
            if self._in_flight[index] and index not in self._polls.values():
                self._polls[actor.poll.remote()] = index
        if not self._polls:
            return []
        (answer,), _ = self._ray.wait(list(self._polls), num_returns=1)
        responses = self._get(answer)
        self._in_flight[self._polls.pop(answer)] -= len(responses)
        return responses

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
            kept = "what is done is kept, and the same command continues"
            raise RunFailedError(f"an engine on Ray failed; {kept}.\n  {type(cause).__name__}: {cause}") from error


class _Actor:
    """Runs an engine in a Ray actor."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._engine = build()

    def ready(self) -> None:
        """Answer once the model is loaded."""

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)

    def poll(self) -> list[Response]:
        return self._engine.poll()
