"""FP32 log-probs and entropy from 16-bit logits, without ever holding FP32 logits of the whole batch.

vLLM divides by the temperature and takes the log-softmax in FP32. A trainer that does either in 16 bits adds a
rounding of the result (2⁻⁸ relative in BF16, 2⁻¹¹ in FP16) to the mismatch.

A rollout with truncated sampling (top-k, top-p, min-p) draws from μ(·)/μ(S), where S are the tokens kept at a place. A
trainer that takes π over the whole vocabulary compares two distributions: the ratio is wrong by the factor π(S), and
the gradient moves probability to tokens that cannot be drawn. With a sampling mask both policies are renormalised over
the rollout's S, a constant. The agent loop requests the mask, the vLLM server adds it to its answer
(`integration/rollout/vllm_sampling_masks.py`), and the mask reaches each micro-batch as a field of the sample.

Shapes: N packed tokens, V vocabulary, R tokens of a response, M kept tokens of all places together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# As in verl: a temperature of zero means greedy sampling, whose log-probs are a limit.
_MIN_TEMPERATURE = 1e-8
# exp(-200) is 0 in FP32; keeps 0·(-inf) out of the entropy's gradient where a logit is masked with -inf.
_MIN_LOG_P = -200.0
MASK_REQUEST_KEY = "verl_precision_kept_tokens"  # how many tokens the rollout should return at each place
MASK_ANSWER_KEY = "kept_tokens"
MASK_FIELD = "sampling_mask"


class SamplingMask(NamedTuple):
    """The tokens that were kept at each of N places; a place without tokens was not truncated."""

    starts: list[int]  # N + 1 numbers: where the tokens of each place begin
    ids_M: Tensor

    def mask_(self, x_CV: Tensor, rows: slice) -> Tensor:
        """Set the logits of dropped tokens to -inf, in place; x_CV are the logits of the places `rows`."""
        starts = torch.tensor(self.starts[rows.start : rows.stop + 1])
        kept_C = starts.diff().to(x_CV.device)
        ids = self.ids_M[starts[0] : starts[-1]]
        dropped_CV = (kept_C > 0).unsqueeze(-1).repeat(1, x_CV.shape[-1])
        dropped_CV[torch.arange(len(kept_C), device=kept_C.device).repeat_interleave(kept_C), ids] = False
        return x_CV.masked_fill_(dropped_CV, -torch.inf)


def pack(counts_R: np.ndarray, ids: np.ndarray) -> Tensor:
    """Return the mask of a response as one int32 tensor: R, then R counts (0: all kept), then the ids."""
    ids = ids[: counts_R.sum()]
    return torch.from_numpy(np.concatenate([[len(counts_R)], counts_R, ids]).astype(np.int32))


def unpack(packed: Sequence[Tensor | None], lengths: Sequence[int], labels_N: Tensor) -> SamplingMask:
    """Return the masks of packed sequences, at the places that predict their tokens (`labels_N`).

    `packed` has the result of `pack` for each sequence, or None if it was not truncated; `lengths` count prompt and
    response. A mask longer than its sequence, or without the drawn token, is an error.
    """
    counts, ids = [], []
    for mask, length in zip(packed, lengths, strict=True):
        places = torch.zeros(length, dtype=torch.int64)
        if mask is not None:
            response = int(mask[0])
            if response >= length:
                raise RuntimeError(f"a sampling mask has {response} tokens, but its sequence has {length}")
            places[length - response - 1 : length - 1] = mask[1 : 1 + response]
            ids.append(mask[1 + response :])
        counts.append(places)
    counts_N = torch.cat(counts).to(labels_N.device)
    ids_M = (torch.cat(ids) if ids else labels_N[:0]).to(labels_N.device, torch.int64)
    places_M = torch.arange(len(counts_N), device=counts_N.device).repeat_interleave(counts_N)
    found_N = torch.zeros_like(counts_N, dtype=torch.bool)
    found_N[places_M[ids_M == labels_N[places_M]]] = True
    if lacking := int(((counts_N > 0) & ~found_N).sum()):
        raise RuntimeError(f"at {lacking} positions the sampling mask does not contain the token that was drawn")
    return SamplingMask([0, *counts_N.cumsum(0).tolist()], ids_M)


def log_probs_and_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    temperature_N: Tensor,
    *,
    chunk_tokens: int,
    with_entropy: bool,
    kept: SamplingMask | None = None,
    inner: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log π(label) = x_label - logsumexp(x) and H = -Σ p·log p, p = softmax(x), with x = logits / T, in FP32.

    The gradient with respect to the logits is ∂log π/∂x = 1_label - p and ∂H/∂x = -p·(log p + H), computed chunk by
    chunk in FP32 and rounded once, to the logits' dtype.

    Args:
        logits_NV: Model outputs, any float dtype; kept unchanged for the backward.
        labels_N: Token ids, int64.
        temperature_N: Temperature of each token, FP32.
        chunk_tokens: Tokens whose FP32 logits exist at one time, at least 1; the extra memory is a few times
            chunk_tokens·V·4 bytes.
        with_entropy: Whether to compute H.
        kept: The tokens that a label was drawn from; logsumexp, p and H are then over these. None: over the vocabulary.
        inner: Dtype of the log-softmax, whose result is rounded once to FP32; None: FP32.

    Returns:
        Log-probs and entropy (None without), FP32, shape (N,), in nats.
    """
    settings = chunk_tokens, with_entropy, kept, inner
    log_probs, entropy = _LogProbs.apply(logits_NV, labels_N, temperature_N.float(), *settings)
    return log_probs, entropy if with_entropy else None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, temperature_N: Tensor,
        chunk_tokens: int, with_entropy: bool, kept: SamplingMask | None, inner: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        temperature_N = temperature_N.clamp(min=_MIN_TEMPERATURE)
        normaliser_N = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
        log_probs_N, entropy_N = torch.empty_like(normaliser_N), torch.zeros_like(normaliser_N)
        for rows in _chunks(logits_NV.shape[0], chunk_tokens):
            x = _scaled(logits_NV, temperature_N, rows, kept)
            normaliser_N[rows] = x.logsumexp(-1)
            if inner is None:
                log_probs_N[rows] = x.gather(-1, labels_N[rows, None]).squeeze(-1) - normaliser_N[rows]
            else:
                log_probs_N[rows] = log_softmax(x, inner=inner).gather(-1, labels_N[rows, None]).squeeze(-1)
            if with_entropy:
                # -Σ p·log p: no difference of large numbers, and 0 where a logit is -inf
                entropy_N[rows] = torch.special.entr(x.sub_(normaliser_N[rows, None]).exp_()).sum(-1)
        ctx.save_for_backward(logits_NV, labels_N, temperature_N, normaliser_N, entropy_N)
        ctx.chunk_tokens, ctx.kept = chunk_tokens, kept
        ctx.set_materialize_grads(False)
        return log_probs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, None, None, None, None]:
        to_log_probs, to_entropy = gradients
        if to_log_probs is None and to_entropy is None:
            return None, None, None, None, None, None, None
        logits_NV, labels_N, temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV.shape[0], ctx.chunk_tokens):
            log_p = _scaled(logits_NV, temperature_N, rows, ctx.kept).sub_(normaliser_N[rows, None])
            p = log_p.clamp_(min=_MIN_LOG_P).exp()
            g = torch.zeros_like(p)
            if to_log_probs is not None:
                upstream = to_log_probs[rows, None].float()
                g.sub_(p * upstream).scatter_add_(-1, labels_N[rows, None], upstream)
            if to_entropy is not None:
                g.sub_(p.mul_(log_p.add_(entropy_N[rows, None])).mul_(to_entropy[rows, None].float()))
            gradient_NV[rows] = g.div_(temperature_N[rows, None]).to(gradient_NV.dtype)
        return gradient_NV, None, None, None, None, None, None


def log_softmax(x: Tensor, *, inner: torch.dtype) -> Tensor:
    """Return log softmax over the last dimension in FP32, without a gradient.

    The largest logit is left out of the sum, so that the log-prob of a nearly certain token keeps all its digits.
    """
    distance = x.to(inner)
    largest = distance.max(-1, keepdim=True)
    distance = distance - largest.values
    itself = largest.values - largest.values  # 0, or NaN where a logit has overflowed
    others = distance.exp().scatter_(-1, largest.indices, 0.0).sum(-1, keepdim=True) + itself
    return (distance - others.log1p()).float()


def _scaled(logits_NV: Tensor, temperature_N: Tensor, rows: slice, kept: SamplingMask | None) -> Tensor:
    x = logits_NV[rows].float() / temperature_N[rows, None]
    return x if kept is None else kept.mask_(x, rows)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
