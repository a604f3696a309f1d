"""Replays the rollout's choice of experts in verl's FSDP engine and compares it with the trainer's.

verl passes `routed_experts` from the rollout to every forward of the actor (`rollout.enable_rollout_routing_replay`).
Only verl's Megatron and VeOmni engines read it. This module does for FSDP, by verl's setting `router_replay.mode`: R3
replays the rollout's choice in the old-log-prob pass and in the update; R2 replays that pass's choice in the update.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from verl.utils import tensordict_utils as tu

from verl_precision.engine.router_replay import ReplayedRouters, known_tokens, routing_agreement, without_padding
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.engine.measurement import with_metrics
from verl_precision.integration.trainer.merged_metrics import metrics_of_loss

CHOICES = "routed_experts"  # verl's field: [tokens, layers, top_k] of each sequence


class RouterReplay:
    """The routers of a model, which can replay the choices of a batch."""

    def __init__(self, module: nn.Module, config: PrecisionFSDPConfig) -> None:
        """Find the routers of a model before sharding, which replaces the modules' classes."""
        self._mode = config.router_replay.mode
        self._routers = ReplayedRouters(module)

    @staticmethod
    def is_asked(config: PrecisionFSDPConfig) -> bool:
        """Return whether the choices are to be replayed, or compared."""
        return config.watch_routing or config.router_replay.mode != "disabled"

    def step(self, step: Callable, micro_batch: Any, loss_function: Callable | None, forward_only: bool) -> Any:
        """Do the engine's step with the batch's choices; in training, report how far the trainer's choices agree."""
        offsets = micro_batch["input_ids"].offsets()
        choices: Any = None
        known: Any = None
        if CHOICES in micro_batch:
            choices = micro_batch[CHOICES].values()
            known = known_tokens(choices, offsets) if self._mode != "R2" else torch.ones(len(choices)).bool()
        # R2 replays the choices of the old-log-prob pass: record them, but not those of a reference.
        reference = tu.get_non_tensor_data(data=micro_batch, key="no_lora_adapter", default=False)
        records = forward_only and self._mode == "R2" and not reference
        replay = choices if self._mode != "disabled" and not records else None
        self._routers.replay(replay, known)  # until the next forward: gradient checkpointing needs it in the backward
        watched: Any = self._routers.watched() if choices is not None or forward_only else contextlib.nullcontext({})

        def agreement(*_: Any) -> Mapping[str, Any]:
            return metrics_of_loss(routing_agreement(seen, choices, known)) if choices is not None and seen else {}

        with watched as seen:
            loss, output = step(micro_batch, loss_function and with_metrics(loss_function, agreement), forward_only)
        if records:
            recorded = without_padding(self._routers.stacked(seen).to(torch.int16), offsets)
            output["model_output"][CHOICES] = torch.nested.nested_tensor_from_jagged(recorded, offsets)
        return loss, output
