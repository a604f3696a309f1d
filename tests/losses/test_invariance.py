"""The gradient of a token does not change with micro-batches, padding, order of rows or ranks. verl's default does.

verl's default is its vanilla loss with seq-mean-token-sum-norm and loss_scale_factor null; what it cannot fail is the
order of the rows.
"""

import pytest
import torch
from loss_calls import ESTIMATORS, VERL_DEFAULT, gradient_through_verl
from plain_equations import Case, case_for, relative_error

ROWS = torch.arange(16)
# The rows of each piece, the columns of padding that all have beside those of verl's `ppo_loss`, which pads to the
# longest response at hand, and the number of ranks: each has its share of the rows, in micro-batches of three.
WAYS = {
    "micro-batches": [(ROWS.split(split), 0, 1) for split in ([8, 8], [4] * 4, [1, 5, 2, 8], [1] * 16)],
    "padding": [([ROWS], wider, 1) for wider in (1, 100)],
    "ranks": [([rows for share in ROWS.chunk(n) for rows in share.split(3)], 0, n) for n in (2, 4)],
    "order of rows": [([ROWS[torch.randperm(16, generator=torch.Generator().manual_seed(0))]], 0, 1)],
}


def as_wide(case: Case, width: int) -> Case:
    """Cut a case, or pad it with tokens that do not count."""
    pad = torch.nn.functional.pad
    by = (0, width - case.mask.shape[1])
    tensors = (pad(getattr(case, name), by, value=-7.0) for name in ("trainer", "proximal", "rollout"))
    return Case(*tensors, case.advantages, pad(case.mask, by))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("estimator", [*ESTIMATORS, VERL_DEFAULT])
def test_each_token_has_the_gradient_that_the_whole_mini_batch_gives_it(estimator, way):
    """Gradients of ranks are averaged, as by FSDP."""
    whole, errors = case_for(estimator, seed=7), []
    expected = gradient_through_verl(estimator, whole)
    for pieces, wider, ranks in WAYS[way]:
        found = torch.full_like(expected, torch.nan)
        for rows in pieces:
            used = whole.mask[rows].any(dim=0).nonzero()
            piece = as_wide(whole.rows(rows), (int(used.max()) + 1 if used.numel() else 1) + wider)
            gradient = gradient_through_verl(estimator, piece, whole=whole, dp_size=ranks) / ranks
            found[rows] = torch.nn.functional.pad(gradient, (0, expected.shape[1] - gradient.shape[1]))
        errors.append(relative_error(found, expected))
    changes = estimator == VERL_DEFAULT and way != "order of rows"  # or the test could not see a change
    assert max(errors) > 0.05 if changes else max(errors) < 1e-6
