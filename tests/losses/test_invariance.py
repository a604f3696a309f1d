"""The gradient does not change with micro-batches, padding, order of rows or ranks. verl's default does, in each test.

verl's default is its vanilla loss with seq-mean-token-sum-norm and loss_scale_factor null; what it cannot fail is the
order of the rows. The parameter is a vector w with log π = given + features · w.
"""

import pytest
import torch
from loss_calls import ESTIMATORS, VERL_DEFAULT, loss_through_verl
from plain_equations import Case, case_for, relative_error
from torch import Tensor

FEATURES = 5
SPLITS = [(16,), (8, 8), (4, 4, 4, 4), (1, 5, 2, 8), (1,) * 16]
RANKS = (1, 2, 4)
ALL = [*ESTIMATORS, VERL_DEFAULT]


def mini_batch(estimator: str) -> tuple[Case, Tensor]:
    case = case_for(estimator, seed=7)
    generator = torch.Generator().manual_seed(1)
    return case, torch.randn(*case.mask.shape, FEATURES, generator=generator, dtype=torch.float64)


def trimmed(case: Case, features: Tensor) -> tuple[Case, Tensor]:
    """Pad to the longest response at hand only, as verl's `ppo_loss` does with each micro-batch."""
    used = case.mask.any(dim=0).nonzero()
    width = int(used.max()) + 1 if used.numel() else 1
    tensors = (getattr(case, name)[:, :width] for name in ("trainer", "proximal", "rollout"))
    return Case(*tensors, case.advantages, case.mask[:, :width]), features[:, :width]


def widened(case: Case, features: Tensor, by: int) -> tuple[Case, Tensor]:
    pad = torch.nn.functional.pad
    tensors = (pad(getattr(case, name), (0, by), value=-7.0) for name in ("trainer", "proximal", "rollout"))
    return Case(*tensors, case.advantages, pad(case.mask, (0, by))), pad(features, (0, 0, 0, by))


def gradient(estimator: str, whole: Case, pieces: list[tuple[Case, Tensor]], dp_size: int = 1) -> Tensor:
    """Return the gradient with respect to w, accumulated over the pieces of one rank."""
    w = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    for case, features in pieces:
        loss, _ = loss_through_verl(estimator, case, case.trainer + features @ w, whole, dp_size)
        loss.backward()
    return w.grad


def assert_invariant(estimator: str, found: list[Tensor], expected: Tensor) -> None:
    """Ours stay as they are; verl's default must change, or the test could not see a change."""
    error = max(relative_error(one, expected) for one in found)
    assert error > 0.05 if estimator == VERL_DEFAULT else error < 1e-6


@pytest.mark.parametrize("estimator", ALL)
def test_micro_batches(estimator):
    whole, features = mini_batch(estimator)
    found = []
    for split in SPLITS:
        pieces = [trimmed(whole.rows(rows), features[rows]) for rows in torch.arange(16).split(split)]
        found.append(gradient(estimator, whole, pieces))
    assert_invariant(estimator, found, found[0])


@pytest.mark.parametrize("estimator", ALL)
def test_padding(estimator):
    whole, features = mini_batch(estimator)
    found = [gradient(estimator, whole, [widened(whole, features, by)]) for by in (0, 1, 100)]
    assert_invariant(estimator, found, found[0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_order_of_rows(estimator):
    whole, features = mini_batch(estimator)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    found = gradient(estimator, whole, [(whole.rows(order), features[order])])
    assert_invariant(estimator, [found], gradient(estimator, whole, [(whole, features)]))


@pytest.mark.parametrize("estimator", ALL)
def test_ranks(estimator):
    """1, 2 and 4 ranks; each has its share of the rows in micro-batches; gradients are averaged, as by FSDP."""
    whole, features = mini_batch(estimator)
    found = []
    for ranks in RANKS:
        shares = [rows.split(3) for rows in torch.arange(16).chunk(ranks)]
        of_ranks = [[trimmed(whole.rows(rows), features[rows]) for rows in share] for share in shares]
        found.append(sum(gradient(estimator, whole, pieces, dp_size=ranks) for pieces in of_ranks) / ranks)
    assert_invariant(estimator, found, gradient(estimator, whole, [(whole, features)]))
