"""Leaves out what this package does about vLLM-CPU's tied head: `LEFT_OUT` is nothing, repair or repair_and_guard.

verl imports this module in every process of a run (`VERL_USE_EXTERNAL_MODULES`). Nothing of vLLM is changed: without
the repair its own layer-wise reload does what it does. That reload loads and repacks each layer that owns a parameter;
the head of a tied model shares the embedding's, and so keeps the copy that was packed at the start.
"""

import os
from types import ModuleType

import wrapt

from verl_precision.weight_sync import verify


def _left_out(part: str) -> bool:
    return part in os.environ.get("LEFT_OUT", "nothing").split("_and_")  # read when it matters: Ray sets it late


def without_repair(vllm_on_cpu: ModuleType) -> None:
    """Let a reload end without packing the layers that share a parameter."""
    found = vllm_on_cpu.shared_parameter_layers
    vllm_on_cpu.shared_parameter_layers = lambda model: () if _left_out("repair") else found(model)


def without_guard() -> None:
    """Let a weight sync find no damage in any layer."""
    find_damage = verify.find_damage
    verify.find_damage = lambda *given, **more: None if _left_out("guard") else find_damage(*given, **more)


wrapt.register_post_import_hook(without_repair, "verl_precision.integration.cpu.vllm_on_cpu")
without_guard()
