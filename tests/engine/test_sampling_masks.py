"""Log-probs over the tokens that sampling kept: the formula in float64, its gradient, and masks that do not fit."""

import numpy as np
import pytest
import torch

from verl_precision.engine.log_probs import log_probs_and_entropy, pack, unpack

V = 50
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


def plain(logits, labels, keep):
    """The formulas, in float64."""
    log_p = torch.log_softmax(logits.masked_fill(~keep, -300), -1)  # -inf has no gradient that is finite
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 512])
def test_values_and_gradient_are_the_formulas(chunk_tokens):
    logits, labels, packed, keep = batch(torch.Generator().manual_seed(0))
    kept, temperature = unpack(packed, LENGTHS, labels), torch.linspace(0.5, 1.5, len(labels))
    logits.requires_grad_()
    found = log_probs_and_entropy(logits, labels, temperature, chunk_tokens=chunk_tokens, with_entropy=True, kept=kept)
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact / temperature.double()[:, None], labels, keep)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=5e-6)
    weights = torch.linspace(-1, 1, len(labels)).double()
    (expected[0] @ weights + expected[1].sum()).backward()
    (found[0].double() @ weights + found[1].sum()).backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=5e-6)
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
