"""vLLM's capture of routed experts, on a CPU.

vLLM returns which experts each token went through (`enable_return_routed_experts`), except where one kernel routes and
computes at once. Its CPU experts count as that, although they choose in Python, so that the choice can be handed over.
"""

from types import ModuleType
from typing import Any

from verl_precision.integration.ledger import wrap_once

_KERNELS = "vllm.model_executor.layers.fused_moe.modular_kernel"


def capture_choices(cpu_moe: ModuleType) -> None:
    """Wrap the CPU experts' choice and their answer to whether it can be captured, once.

    Args:
        cpu_moe: `vllm.model_executor.layers.fused_moe.experts.cpu_moe`.
    """
    wrap_once(_KERNELS, "FusedMoEExpertsMonolithic.supports_routing_replay_capture", _supported)
    wrap_once(cpu_moe.__name__, "CPUUnquantizedExperts._select_experts", _captured)


def bind_again(model_runner: Any) -> None:
    """Attach the capture to the experts' kernels, which a reload on a CPU has built anew.

    Args:
        model_runner: vLLM's.
    """
    if getattr(model_runner, "routed_experts_initialized", False):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        bind_routed_experts_capturer(model_runner.model, model_runner.routed_experts_capturer)


def _supported(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    return wrapped(*args, **kwargs) or type(instance).__name__ == "CPUUnquantizedExperts"


def _captured(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    weights, experts = wrapped(*args, **kwargs)
    if instance.routing_replay_capture_fn is not None:
        instance.routing_replay_capture_fn(experts)
    return weights, experts
