"""Every check of the self-test, and what a check may say."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# What a check measured, by name with its unit.
Figures = dict[str, float | int | str]

_ENGINE = "verl_precision.tools.selftest.selftest_engine"
_TENSORS = "verl_precision.tools.selftest.engine_checks"
_STACK = "verl_precision.tools.selftest.stack_checks"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Name on the command line and in selftest.json.
        part: "A" (engine) or "B" (whole stack).
        shows: What is known when it has passed.
        function: `module:function`, called with the device ("cuda" or "cpu") and a folder of its own. It returns what
            it measured and raises if the machine fails.
        seconds: Time limit.
        needs_gpu: Why a CPU cannot run it; empty if it can.
        alone: Whether no other check may use the GPU meanwhile: vLLM compares the free memory when it sleeps.
    """

    name: str
    part: str
    shows: str
    function: str
    seconds: int = 300
    needs_gpu: str = ""
    alone: bool = False

    def load(self) -> Callable[[str, Path], Figures]:
        """Import the check's function."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(module), name)


CHECKS: tuple[Check, ...] = (
    Check("installation", "A", "versions, plugin and host symbols are as tested", f"{_TENSORS}:installation"),
    Check("fp16_updates", "A", "50 FP16 updates: overflows skipped, scale exact, resumed", f"{_ENGINE}:fp16_updates"),
    Check(
        *("fp16_updates_fsdp1", "A", "the same under FSDP1", f"{_ENGINE}:fp16_updates_fsdp1"),
        needs_gpu="FSDP1 cannot wrap CPU parameters",
    ),
    Check(
        *("offload_overflow", "A", "500 overflows under offload_policy, none missed", f"{_TENSORS}:offload_overflow"),
        needs_gpu="gradients and loss scale are on one device",
    ),
    Check("shadow_offload", "A", "the shadow follows its actor, which a GPU offloads", f"{_ENGINE}:shadow_offload"),
    Check("log_probs", "A", "FP32 log-probs of a long batch: exact, in little memory", f"{_TENSORS}:log_probs"),
    Check("digest", "A", "one flipped bit of gigabytes is seen; speed of the digest", f"{_TENSORS}:digests"),
    Check(
        *("grouped_experts", "A", "time of MoE experts in FP16 beside BF16", f"{_TENSORS}:grouped_experts"),
        needs_gpu="the kernels in question are CUDA's",
    ),
    Check(
        *("tied_model", "B", "a tied model trains, sleeps, wakes; every layer verified", f"{_STACK}:tied_model"),
        seconds=600,
        alone=True,
    ),
    Check("precision_gap", "B", "BF16 has at least 10 times the mismatch of FP16", f"{_STACK}:precision_gap", 600),
    Check("flipped_bit", "B", "one flipped bit in a weight sync stops the run", f"{_STACK}:flipped_bit"),
    Check("lost_tensor", "B", "a tensor lost in a weight sync stops the run", f"{_STACK}:lost_tensor"),
    Check("bf16_sender", "B", "weights rounded to BF16 on the way stop the run", f"{_STACK}:bf16_sender"),
    Check("moe", "B", "a mixture of experts trains in FP16", f"{_STACK}:moe"),
    Check("lora_merged", "B", "LoRA, merged for the rollout", f"{_STACK}:lora_merged"),
    Check("lora_adapter", "B", "LoRA, as an adapter of the rollout", f"{_STACK}:lora_adapter"),
    Check("fsdp1", "B", "a run under FSDP1", f"{_STACK}:fsdp1", needs_gpu="FSDP1 cannot wrap CPU parameters"),
    Check("resume", "B", "a killed run goes on from its checkpoint", f"{_STACK}:resume", 600),
)
