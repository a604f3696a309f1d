"""Faults that `verl-precision selftest` plants in a run of its own, to see whether the run stops.

Loaded through verl's `VERL_USE_EXTERNAL_MODULES` in every process of such a run, and in no other.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import wrapt
from torch import Tensor

from verl_precision.weight_sync.manifest import MANIFEST_NAME, bit_view

_FAULT = os.environ.get("VERL_PRECISION_SELFTEST_FAULT", "")


def _damage_arrivals(module: Any) -> None:
    extension = module.VerifiedWeightSyncExtension
    update = extension._update_weights
    done: list[bool] = []

    def damaged(self: Any, weights: list[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> None:
        weights = list(weights)
        if not done and weights and weights[0][0] != MANIFEST_NAME:
            done.append(True)
            name, tensor = weights.pop(0)
            if _FAULT == "flipped_bit":
                tensor = tensor.clone()
                bit_view(tensor)[0] ^= 1
                weights.insert(0, (name, tensor))
        return update(self, weights, *args, **kwargs)

    extension._update_weights = damaged


def _round_what_is_sent(module: Any) -> None:
    send = module.send_with_manifest

    def rounded(weights: Iterable[tuple[str, Tensor]], *args: Any) -> Iterator[tuple[str, Tensor]]:
        return send(((name, tensor.to(torch.bfloat16)) for name, tensor in weights), *args)

    module.send_with_manifest = rounded


if _FAULT in ("flipped_bit", "lost_tensor"):
    wrapt.register_post_import_hook(_damage_arrivals, "verl_precision.integration.weight_sync_worker")
elif _FAULT == "bf16_sender":
    wrapt.register_post_import_hook(_round_what_is_sent, "verl_precision.integration.weight_export")
