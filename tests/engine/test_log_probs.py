"""FP32 log-probs and entropy: right, differentiable, bounded in memory, and better than verl's on 16-bit logits."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_v2

from verl_precision.engine.log_probs import log_probs_and_entropy, log_softmax, pack, unpack

N, V = 13, 50


def inputs(dtype, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(N, V, generator=generator)).to(dtype)
    labels = torch.randint(0, V, (N,), generator=generator)
    temperature = torch.linspace(0.5, 1.5, N)
    return logits.requires_grad_(requires_grad), labels, temperature


def ours(logits, labels, temperature, chunk_tokens=4, kept=None):
    return log_probs_and_entropy(logits, labels, temperature, chunk_tokens=chunk_tokens, with_entropy=True, kept=kept)


def plain(logits, labels, temperature, keep=None):
    """The formulas, in float64, perhaps over the tokens to keep."""
    scaled = logits.double() / temperature.double()[:, None]
    scaled = scaled if keep is None else scaled.masked_fill(~keep, -300)  # -inf has no gradient that is finite
    log_p = torch.log_softmax(scaled, -1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def test_only_what_is_asked_gets_a_gradient():
    logits, labels, temperature = inputs(torch.float32, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, labels, temperature, chunk_tokens=4, with_entropy=False)
    assert entropy is None
    log_probs.sum().backward()
    expected = torch.autograd.grad(plain(logits, labels, temperature)[0].sum(), logits)[0]
    torch.testing.assert_close(logits.grad, expected)


def test_a_masked_logit_leaves_everything_finite():
    logits, labels, temperature = inputs(torch.float32, requires_grad=True)
    with torch.no_grad():
        logits[0, (labels[0] + 1) % V] = -torch.inf
    log_probs, entropy = ours(logits, labels, temperature)
    (log_probs.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(tensor).all() for tensor in (log_probs, entropy, logits.grad))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_verls_error_on_16_bit_logits_and_ours(dtype):
    """Mean absolute error in nats against float64, verl's and ours: log-probs FP16 6.1e-3 and 7e-7, BF16 3.8e-2, 7e-7;
    entropy FP16 5.7e-3 and 4e-7, BF16 4.7e-2 and 4e-7."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(512, 1000, generator=generator)).to(dtype)
    labels = torch.randint(0, 1000, (512,), generator=generator)
    temperature = torch.full((512,), 0.7)
    exact, found = plain(logits, labels, temperature), ours(logits, labels, temperature, chunk_tokens=64)
    scaled = logits / temperature[:, None].to(dtype)
    theirs = logprobs_from_logits_v2(scaled, labels), entropy_from_logits(scaled)
    for expected, by_verl, by_us, bar in zip(exact, theirs, found, (2e-6, 1e-5), strict=True):
        assert (by_verl.double() - expected).abs().mean() > 1e-3
        assert (by_us.double() - expected).abs().mean() < bar


class LargestFP32(TorchDispatchMode):
    """Records the largest FP32 tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_fp32_tensor_exceeds_a_chunk_of_logits(chunk_tokens=5):
    logits, labels, temperature = inputs(torch.float16, requires_grad=True)
    with LargestFP32() as seen:
        log_probs, entropy = ours(logits, labels, temperature, chunk_tokens)
        (log_probs.sum() + entropy.sum()).backward()
    assert 0 < seen.largest <= chunk_tokens * V


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
def test_log_softmax(inner):
    x = torch.randn(40, 500, generator=torch.Generator().manual_seed(0)) * 10
    x[1, 3], x[2], x[3, 7:] = 60.0, x[2] * 0, float("-inf")
    found = log_softmax(x, inner=inner)
    assert found.dtype == torch.float32
    expected = x.double().log_softmax(-1)
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-6)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    again = torch.cat([log_softmax(row, inner=inner) for row in x[:, order].split(3)])[:, order.argsort()]
    if inner == torch.float64:
        assert torch.equal(found, again)
        others = torch.cat((x[1, :3], x[1, 4:])).double() - 60
        assert found[1, 3] == -others.exp().sum().float() < 0, "a log-prob near 0 has all of its digits"
    overflown = torch.tensor([[float("inf"), 0.0], [float("nan"), 0.0], [float("-inf"), float("-inf")]])
    assert log_softmax(overflown, inner=inner).isnan().all()
    assert log_softmax(x[:0], inner=inner).shape == (0, 500)


LENGTHS, RESPONSES = (9, 4, 7), (6, 1, 3)


def batch(generator) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Logits, labels and masks of three packed sequences, and the same masks as bool [N, V]."""
    logits = 3 * torch.randn(sum(LENGTHS), V, generator=generator)
    labels = torch.randint(0, V, (sum(LENGTHS),), generator=generator)
    keep, packed, start = torch.ones(sum(LENGTHS), V, dtype=torch.bool), [], 0
    for length, response in zip(LENGTHS, RESPONSES, strict=True):
        start += length
        places = slice(start - 1 - response, start - 1)
        kept = torch.rand(response, V, generator=generator) < 0.2
        keep[places] = kept.scatter(1, labels[places, None], True)
        packed.append(pack(keep[places].sum(1).numpy(), keep[places].nonzero()[:, 1].numpy()))
    return logits, labels, packed, keep


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("truncated", [False, True])
def test_values_and_gradient_are_the_formulas(truncated, dtype, chunk_tokens):
    """Over all tokens, and over those that sampling kept."""
    logits, labels, packed, keep = batch(torch.Generator().manual_seed(0))
    logits, temperature = logits.to(dtype).requires_grad_(), torch.linspace(0.5, 1.5, len(labels))
    kept, keep = (unpack(packed, LENGTHS, labels), keep) if truncated else (None, torch.ones_like(keep))
    log_probs, entropy = ours(logits, labels, temperature, chunk_tokens, kept)
    assert log_probs.dtype == entropy.dtype == torch.float32
    reference = logits.detach().double().requires_grad_()
    expected = plain(reference, labels, temperature, keep)
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=5e-6)
    weights = torch.linspace(-1, 1, len(labels))
    (log_probs @ weights + 0.3 * entropy.sum()).backward()
    (expected[0] @ weights.double() + 0.3 * expected[1].sum()).backward()
    assert logits.grad.dtype == dtype
    once_rounded = reference.grad.to(dtype)  # one rounding; FP32 noise may tip it to a neighbour
    torch.testing.assert_close(logits.grad, once_rounded, rtol=2 * torch.finfo(dtype).eps, atol=3e-6)
    assert (logits.grad[~keep] == 0).all(), "no token that could not be drawn is pushed"


def test_a_sequence_without_a_mask_is_not_truncated():
    _, labels, packed, _ = batch(torch.Generator().manual_seed(0))
    kept = unpack([None, packed[1], None], LENGTHS, labels)
    assert len(kept.starts) == sum(LENGTHS) + 1
    assert torch.tensor(kept.starts).diff().nonzero().tolist() == [[LENGTHS[0] + LENGTHS[1] - 2]]
    assert len(unpack([None] * 3, LENGTHS, labels).ids_M) == 0


def test_a_mask_that_is_not_of_its_response_is_refused():
    _, labels, packed, _ = batch(torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="but its sequence has 4"):
        unpack([None, packed[0], None], LENGTHS, labels)
    with pytest.raises(RuntimeError, match="does not contain the token that was drawn"):
        unpack(packed, LENGTHS, labels.roll(1))


def test_as_it_travels():
    assert pack(np.array([3, 0, 1]), np.arange(10)).tolist() == [3, 3, 0, 1, 0, 1, 2, 3]
