"""A separate weight socket for each run, so that two runs on one host do not load each other's weights.

verl's trainer sends the weights to vLLM through a UNIX socket in /tmp, named after the Ray job, and the first job of
every Ray has the same name. The driver therefore chooses a name before Ray starts, and both ends find it in their
environment. In a Ray that ran before, neither end has this name, and the job's name is unique.
"""

import os
import uuid
from typing import Any

from verl_precision.base.owner import RUN_MARK
from verl_precision.integration.ledger import wrapping

VARIABLE = "VERL_PRECISION_WEIGHT_SOCKET"


def choose_name() -> None:
    """Choose the name of this run's sockets, for all child processes: the mark that `compare` gave, or at random."""
    os.environ[VARIABLE] = (os.environ.get(RUN_MARK) or uuid.uuid4().hex)[:12]


def own_path(path: str) -> str:
    """Return verl's path of a weight socket, with this run's name in it."""
    name = os.environ.get(VARIABLE)
    return path.replace("/rl-colocate-zmq-", f"/rl-colocate-zmq-{name}-") if name else path


@wrapping("ServerAdapter.__init__")
def name_at_the_sender(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Put the run's name into the trainer's socket; `VerifiedWeightSyncExtension` does so at the receiver."""
    wrapped(*args, **kwargs)
    extension = (instance.config.engine_kwargs.get("vllm") or {}).get("worker_extension_cls")
    if str(extension).startswith("verl_precision."):  # otherwise the receiver is verl's
        instance.zmq_handle = own_path(instance.zmq_handle)
