"""What of a teacher's signal is noise: against plain formulas, and on noise whose answer is known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.mismatch.distillation import DistillationStatistics
from verl_precision.mismatch.packing import flattened

TEACHER, TRAINER = torch.tensor([[-1.0, -2.5, -0.1]]), torch.tensor([[-1.2, -2.0, -0.1]])
ROLLOUT = torch.tensor([[-0.9, -1.9, -0.3]])


def measured(*log_probs: torch.Tensor, mask: torch.Tensor | None = None) -> DistillationStatistics:
    mask = torch.ones(log_probs[0].shape) if mask is None else mask
    return DistillationStatistics.of_batch(flattened(*log_probs, mask=mask))


def test_signal_and_floor_are_the_plain_formulas():
    metrics = measured(TEACHER, TRAINER, ROLLOUT).metrics()
    assert metrics == pytest.approx({
        "distillation/teacher_gap_mean": (0.2 - 0.5 + 0) / 3,
        "distillation/teacher_gap_square_mean": (0.04 + 0.25) / 3,
        "distillation/floor_square_mean": (0.09 + 0.01 + 0.04) / 3,
        "distillation/noise_share": 0.14 / 0.29,
        "distillation/sign_noise_fraction": 2 / 3,  # the first token's turns, the last one's is 0
        "distillation/teacher_rollout_square_mean": (0.01 + 0.36 + 0.04) / 3,
        "distillation/teacher_equal_fraction": 1 / 3,
    }, rel=1e-5)  # fmt: skip


def test_equal_engines_have_no_signal_and_no_share_of_it():
    metrics = measured(TRAINER, TRAINER, TRAINER).metrics()
    assert math.isnan(metrics.pop("distillation/noise_share", math.nan))
    assert metrics.pop("distillation/teacher_equal_fraction") == 1 and not any(metrics.values())


@pytest.mark.parametrize(("distance", "share", "signs"), [
    (0.0, (0.97, 1.03), (0.31, 0.36)),
    (1.0, (0.0, 0.01), (0.0, 0.06)),
])  # fmt: skip
def test_noise_alone_turns_a_third_of_the_signs(distance, share, signs):
    """Three engines with independent errors; a far teacher is told apart. Bars: 8 standard errors of 40,000 tokens."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.full((4, 10_000), -5.0)
    teacher, trainer, rollout = (truth + 0.05 * torch.randn(truth.shape, generator=generator) for _ in range(3))
    metrics = measured(teacher + distance * torch.randn(truth.shape, generator=generator), trainer, rollout).metrics()
    assert share[0] <= metrics["distillation/noise_share"] <= share[1]
    assert signs[0] <= metrics["distillation/sign_noise_fraction"] <= signs[1]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_parts_merge_and_masked_tokens_have_no_effect(rows, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    log_probs = [-torch.rand(rows, tokens, generator=generator) for _ in range(3)]
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    whole = measured(*log_probs, mask=mask).metrics()
    parts = [measured(*(each[row : row + 1] for each in log_probs), mask=mask[row : row + 1]) for row in range(rows)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    spoilt = [each.masked_fill(~mask, float("nan")) for each in log_probs]
    for other in (merged.metrics(), measured(*spoilt, mask=mask).metrics()):
        assert other == pytest.approx(whole, nan_ok=True)


def test_the_truncated_kl_counts_what_verl_clamps():
    losses, mask = torch.tensor([[0.2, -0.1, 0.0, float("nan")]]), torch.tensor([[1, 1, 1, 0]])
    metrics = DistillationStatistics.of_truncated(losses, mask).metrics()
    assert metrics == pytest.approx({"distillation/clamped_fraction": 1 / 3, "distillation/loss_abs_mean": 0.1})
