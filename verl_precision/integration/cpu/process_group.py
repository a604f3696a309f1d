"""verl asks for `cpu:gloo,<device>:<backend>`; with device cpu that names the CPU twice and torch refuses it."""

from types import ModuleType

import wrapt

from verl_precision.integration.ledger import PROCESS_GROUP, require_expected_signature

BACKEND = "cpu:gloo"


def patch_process_group(distributed: ModuleType) -> None:
    """Give `initialize_global_process_group_ray` its own `backend` argument on a CPU; elsewhere nothing changes."""
    if isinstance(getattr(distributed, PROCESS_GROUP.name, None), wrapt.FunctionWrapper):
        return
    require_expected_signature(PROCESS_GROUP, distributed)
    wrapt.wrap_function_wrapper(distributed, PROCESS_GROUP.name, _with_single_backend)


def _with_single_backend(wrapped, instance, args, kwargs):
    from verl.utils.device import get_device_name

    timeout, backend = (*args, None, None)[:2]
    timeout = kwargs.get("timeout_second", timeout)
    backend = kwargs.get("backend", backend)
    if backend is None and get_device_name() == "cpu":
        backend = BACKEND
    return wrapped(timeout_second=timeout, backend=backend)
