"""Ledger of every host symbol that is patched, overridden, or used though nobody promised it.

    entry         what an entry says, and how a symbol is compared with it
    verl          verl's driver, registries, and what is wrapped
    verl_workers  verl's FSDP engines, and its worker extension inside vLLM
    vllm          vLLM's layer-wise reload
    torch         torch's gradient scaler, and private names

An entry says what is touched, why, how, where upstream discusses it, and when it can go. When a host module is
imported, the plugin compares it with its entries (`check_module`): a symbol that no longer looks as it did in the
tested releases is an error that names the entry, never a patch applied to something else. That nothing is missing here
is tested (`tests/platforms/test_ledger.py`).
"""

from types import ModuleType

from verl_precision.integration.ledger import torch, verl, verl_workers, vllm
from verl_precision.integration.ledger.entry import LedgerEntry, require_expected_signature
from verl_precision.integration.ledger.verl import (
    METRIC_AGGREGATE_DP,
    METRIC_FROM_DICT,
    PROCESS_GROUP,
    ROLLOUT_WEIGHTS,
)
from verl_precision.integration.ledger.verl_workers import ITER_MODELS, UPDATE_FROM_IPC, UPDATE_WEIGHTS

__all__ = [
    "ITER_MODELS",
    "LEDGER",
    "METRIC_AGGREGATE_DP",
    "METRIC_FROM_DICT",
    "PROCESS_GROUP",
    "ROLLOUT_WEIGHTS",
    "UPDATE_FROM_IPC",
    "UPDATE_WEIGHTS",
    "LedgerEntry",
    "check_module",
    "modules_to_check",
    "require_expected_signature",
]

LEDGER: tuple[LedgerEntry, ...] = (*verl.ENTRIES, *verl_workers.ENTRIES, *vllm.ENTRIES, *torch.ENTRIES)


def modules_to_check(on_cpu: bool) -> list[str]:
    """Return the host modules that have entries; of vLLM only on a CPU: elsewhere verl's own pin decides.

    Args:
        on_cpu: whether the rollout is vLLM's CPU build.
    """
    modules = dict.fromkeys(entry.module for entry in LEDGER)
    return [module for module in modules if on_cpu or not module.startswith("vllm.")]


def check_module(module: ModuleType) -> None:
    """Compare an imported host module with its entries.

    Args:
        module: the host module.

    Raises:
        RegistrationError: naming the first symbol that has changed.
    """
    for entry in LEDGER:
        if entry.module == module.__name__:
            require_expected_signature(entry, module)
