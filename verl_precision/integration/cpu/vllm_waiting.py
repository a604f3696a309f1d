"""vLLM's processes wait for each other without computing: on a CPU they share their cores with the trainer.

A reader of vLLM's message queue asks again and again for a second after each message, and only then sleeps until it is
told of the next. On a GPU's host that saves microseconds. On a laptop the worker of a tiny model spends more time
asking than generating, and takes it from the trainer of its own run.
"""

from types import ModuleType
from typing import Any

from verl_precision.integration.ledger import wrap_once

BUSY_SECONDS = 0.02  # longer than the step of a tiny model, shorter than anything a trainer does


def wait_asleep(shm_broadcast: ModuleType) -> None:
    """Wrap the reader's condition, once; elsewhere than on verl's device cpu nothing changes.

    Args:
        shm_broadcast: `vllm.distributed.device_communicators.shm_broadcast`.
    """
    wrap_once(shm_broadcast.__name__, "SpinCondition.__init__", _without_busy_loop)


def _without_busy_loop(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu" and len(args) < 4:
        kwargs = {"busy_loop_s": BUSY_SECONDS, **kwargs}
    wrapped(*args, **kwargs)
