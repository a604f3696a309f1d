"""Sampling masks: the tokens that top-k, top-p and min-p kept, which the trainer renormalises over.

A rollout with truncated sampling draws from μ(·)/μ(S), where S is what was kept at that place. A trainer that takes
π over the whole vocabulary compares two distributions: the ratio is off by π(S), and the gradient moves probability to
tokens that cannot be drawn. With the mask both are renormalised over S, which was the rollout's and is data by now: no
gradient flows through its choice.

The agent loop asks for them, the vLLM server adds them to its answer (`integration/rollout/vllm_sampling_masks.py`),
and they travel as a field of the sample to each micro-batch (`integration/engine/model_outputs.py`).

Shapes: R tokens of a response, N packed tokens, M kept tokens of all of these together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MASK_REQUEST_KEY = "verl_precision_kept_tokens"  # how many tokens the rollout should say at each place
MASK_ANSWER_KEY = "kept_tokens"
MASK_FIELD = "sampling_mask"


class SamplingMask(NamedTuple):
    """Of each of N places, which tokens were kept; a place with none was not truncated."""

    starts: list[int]  # N + 1 numbers: where the tokens of each place begin
    ids_M: Tensor

    def mask_(self, x_CV: Tensor, rows: slice) -> Tensor:
        """Set to -inf, in place, what was not kept; x_CV are the logits of the places `rows`."""
        starts = torch.tensor(self.starts[rows.start : rows.stop + 1])
        kept_C = starts.diff().to(x_CV.device)
        ids = self.ids_M[starts[0] : starts[-1]]
        dropped_CV = (kept_C > 0).unsqueeze(-1).repeat(1, x_CV.shape[-1])
        dropped_CV[torch.arange(len(kept_C), device=kept_C.device).repeat_interleave(kept_C), ids] = False
        return x_CV.masked_fill_(dropped_CV, -torch.inf)


def pack(counts_R: np.ndarray, ids: np.ndarray) -> Tensor:
    """Return the mask of a response as it travels, int32: R, R counts (0: all kept), then as many ids."""
    ids = ids[: counts_R.sum()]
    return torch.from_numpy(np.concatenate([[len(counts_R)], counts_R, ids]).astype(np.int32))


def unpack(packed: Sequence[Tensor | None], lengths: Sequence[int], labels_N: Tensor) -> SamplingMask:
    """Return the masks of packed sequences, at the places that predict their tokens (`labels_N`).

    `packed` holds of each sequence the result of `pack`, or None where it was not truncated; `lengths` are of prompt
    and response. A mask longer than its sequence, or without the drawn token, is an error.
    """
    counts, ids = [], []
    for mask, length in zip(packed, lengths, strict=True):
        places = torch.zeros(length, dtype=torch.int64)
        if mask is not None:
            response = int(mask[0])
            if response >= length:
                raise RuntimeError(f"a sampling mask of {response} tokens belongs to a sequence of {length}")
            places[length - response - 1 : length - 1] = mask[1 : 1 + response]
            ids.append(mask[1 + response :])
        counts.append(places)
    counts_N = torch.cat(counts).to(labels_N.device)
    ids_M = (torch.cat(ids) if ids else labels_N[:0]).to(labels_N.device, torch.int64)
    places_M = torch.arange(len(counts_N), device=counts_N.device).repeat_interleave(counts_N)
    found_N = torch.zeros_like(counts_N, dtype=torch.bool)
    found_N[places_M[ids_M == labels_N[places_M]]] = True
    if lacking := int(((counts_N > 0) & ~found_N).sum()):
        raise RuntimeError(f"the sampling masks of {lacking} places lack the token that was drawn there")
    return SamplingMask([0, *counts_N.cumsum(0).tolist()], ids_M)
