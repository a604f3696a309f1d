"""Every check of the self-test: its name, what it shows, where its function is."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# What a check measured, by name with its unit.
Figures = dict[str, float | int | str]

_ENGINE, _TENSORS, _STACK = (
    f"verl_precision.tools.selftest.{module}" for module in ("selftest_engine", "engine_checks", "stack_checks")
)
_FSDP1 = "FSDP1 cannot wrap CPU parameters"


@dataclass(frozen=True)
class Check:
    """One check. Its function has the check's name; it is called with the device and a folder of its own.

    It returns what it measured, and raises if the machine fails.
    """

    name: str  # on the command line and in selftest.json
    part: str  # "A" (engine) or "B" (whole stack)
    shows: str  # what is known when it has passed
    module: str  # of its function
    seconds: int = 300  # time limit
    needs_gpu: str = ""  # why a CPU cannot run it
    alone: bool = False  # no other check may use the GPU meanwhile: vLLM compares free memory when it sleeps

    def load(self) -> Callable[[str, Path], Figures]:
        """Import the check's function."""
        return getattr(import_module(self.module), self.name)


CHECKS: tuple[Check, ...] = (
    Check("installation", "A", "versions, plugin and host symbols are as tested", _TENSORS),
    Check("fp16_updates", "A", "50 FP16 updates: overflows skipped, scale exact, resumed", _ENGINE),
    Check("fp16_updates_fsdp1", "A", "the same under FSDP1", _ENGINE, needs_gpu=_FSDP1),
    Check(
        *("offload_overflow", "A", "500 overflows under offload_policy, none missed", _TENSORS),
        needs_gpu="gradients and loss scale are on one device",
    ),
    Check("shadow_offload", "A", "the shadow follows its actor, which a GPU offloads", _ENGINE),
    Check("log_probs", "A", "FP32 log-probs of a long batch: exact, in little memory", _TENSORS),
    Check("digest", "A", "one flipped bit of gigabytes is seen; speed of the digest", _TENSORS),
    Check(
        *("grouped_experts", "A", "time of MoE experts in FP16 beside BF16", _TENSORS),
        needs_gpu="the kernels in question are CUDA's",
    ),
    Check("tied_model", "B", "a tied model trains, sleeps, wakes; every layer verified", _STACK, 600, alone=True),
    Check("precision_gap", "B", "BF16 has at least 10 times the mismatch of FP16", _STACK, 600),
    Check("flipped_bit", "B", "one flipped bit in a weight sync stops the run", _STACK),
    Check("lost_tensor", "B", "a tensor lost in a weight sync stops the run", _STACK),
    Check("bf16_sender", "B", "weights rounded to BF16 on the way stop the run", _STACK),
    Check("moe", "B", "a mixture of experts trains in FP16", _STACK),
    Check("lora_merged", "B", "LoRA, merged for the rollout", _STACK),
    Check("lora_adapter", "B", "LoRA, as an adapter of the rollout", _STACK),
    Check("fsdp1", "B", "a run under FSDP1", _STACK, needs_gpu=_FSDP1),
    Check("resume", "B", "a killed run goes on from its checkpoint", _STACK, 600),
)
