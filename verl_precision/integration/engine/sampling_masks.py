"""Sampling masks on their way through verl: from a rollout's answer to the trainer's log-probs.

The agent loop asks for them with the sampling parameters (`MASK_REQUEST_KEY`), the vLLM server adds them to the answer
(`MASK_ANSWER_KEY`, `vllm_sampling_masks.py`), and they travel as a field of the sample (`MASK_FIELD`) through
TransferQueue to each micro-batch.
"""

from typing import Any

from torch import Tensor

from verl_precision.engine.sampling_masks import KeptTokens, unpack

MASK_REQUEST_KEY = "verl_precision_kept_tokens"  # how many tokens the rollout should say at each place
MASK_ANSWER_KEY = "kept_tokens"
MASK_FIELD = "sampling_mask"


def kept_tokens(micro_batch: Any, labels_N: Tensor) -> KeptTokens | None:
    """Return the tokens that each place of a micro-batch was drawn from; None if sampling was not truncated.

    verl's padding samples are copies of another one with one token, which is not trained on: their masks are left out.

    Args:
        micro_batch: verl's.
        labels_N: The token that each place predicts.

    Raises:
        RuntimeError: If a mask is not that of its response.
    """
    if MASK_FIELD not in micro_batch:
        return None
    lengths = micro_batch["input_ids"].offsets().diff().tolist()
    trained = (mask.any() for mask in micro_batch["loss_mask"].unbind())
    packed = [
        mask if any_token else None for mask, any_token in zip(micro_batch[MASK_FIELD].unbind(), trained, strict=True)
    ]
    return unpack(packed, lengths, labels_N)
