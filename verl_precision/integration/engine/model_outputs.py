"""Temperature, log-probs and entropy of a forward in FP32, chunk by chunk."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu

from verl_precision.engine.arithmetic_choice import inner_dtype
from verl_precision.engine.log_probs import MASK_FIELD, SamplingMask, log_probs_and_entropy, unpack


def fp32_outputs(
    engine: Any, output: Any, output_args: dict, micro_batch: Any, verls: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return nested log-probs and entropy in FP32.

    Fused kernels return no logits, so verl's path is used. Distillation and Σπ² need all logits at once: verl's path on
    FP32 logits, without chunks. `output_args` come from verl's `prepare_model_inputs`.
    """
    ask = partial(tu.get_non_tensor_data, data=micro_batch, default=False)
    if ask(key="use_fused_kernels"):
        return verls()
    if any(ask(key=k) for k in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")):
        output.logits = output.logits.float()
        return verls()
    logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
    offsets = micro_batch["input_ids"].offsets()
    packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
    if packed:
        logits_NV, temperature_N = logits.squeeze(0), output_args["temperature_rmpad"]
    else:
        lengths = offsets.diff()
        logits_NV = logits[torch.arange(logits.shape[1], device=logits.device) < lengths.unsqueeze(1)]
        temperature_N = output_args["temperature"].repeat_interleave(lengths)
    labels_N = output_args["input_ids_rmpad_rolled"]
    log_probs, entropy = log_probs_and_entropy(
        logits_NV,
        labels_N,
        temperature_N,
        chunk_tokens=engine.engine_config.log_prob_chunk_tokens,
        with_entropy=bool(ask(key="calculate_entropy")),
        kept=kept_tokens(micro_batch, labels_N),
        inner=inner_dtype(),
    )
    outputs = {"log_probs": log_probs, **({} if entropy is None else {"entropy": entropy})}
    if packed:
        outputs = {k: engine._gather_and_unpad_packed(v, output_args["pad_size"]) for k, v in outputs.items()}
    return {k: torch.nested.nested_tensor_from_jagged(v, offsets) for k, v in outputs.items()}


def kept_tokens(micro_batch: Any, labels_N: Tensor) -> SamplingMask | None:
    """Return the tokens that sampling kept at each position, except verl's padding; None without masks."""
    if MASK_FIELD not in micro_batch:
        return None
    lengths = micro_batch["input_ids"].offsets().diff().tolist()
    masks = zip(micro_batch[MASK_FIELD].unbind(), micro_batch["loss_mask"].unbind(), strict=True)
    return unpack([mask if trained.any() else None for mask, trained in masks], lengths, labels_N)
