"""A fault that `verl-precision selftest` plants in the trainer of a run of its own: weights rounded to BF16.

Loaded through verl's `VERL_USE_EXTERNAL_MODULES` in every process of that run, and in no other.
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch import Tensor


def _round_what_is_sent(transformer_impl: ModuleType) -> None:
    from verl_precision.integration.engine import weight_export

    send = weight_export.send_with_manifest

    def rounded(weights: Iterable[tuple[str, Tensor]], *args: Any) -> Iterator[tuple[str, Tensor]]:
        return send(((name, tensor.to(torch.bfloat16)) for name, tensor in weights), *args)

    vars(weight_export)["send_with_manifest"] = rounded


wrapt.register_post_import_hook(_round_what_is_sent, "verl.workers.engine.fsdp.transformer_impl")
