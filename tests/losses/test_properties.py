"""hypothesis: whatever numbers come in, loss and gradient are finite; masked tokens never matter."""

import math

import torch
from conftest import run
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.losses import POLICY_LOSSES, Aggregation, seq_mis_weights, token_tis_weights

LOSSES = [entry.function for entry in POLICY_LOSSES.values()]
MODES = ("seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean")
ANY_FLOAT32 = st.floats(allow_nan=True, allow_infinity=True, width=32)
FINITE_FLOAT32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
LOG_PROB = st.one_of(st.floats(-30, 0, width=32), st.floats(-1000, 0, width=32), FINITE_FLOAT32)
ADVANTAGE = st.one_of(st.floats(-5, 5, width=32), FINITE_FLOAT32)


@st.composite
def batches(draw, log_prob=LOG_PROB, advantage=ADVANTAGE):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def matrix(values):
        return torch.tensor(draw(st.lists(values, min_size=rows * width, max_size=rows * width))).reshape(rows, width)

    return matrix(log_prob), matrix(log_prob), matrix(advantage), matrix(st.booleans())


@given(batch=batches(), mode=st.sampled_from(MODES))
def test_finite_in_finite_out(batch, mode):
    for loss in LOSSES:
        value, gradient, metrics = run(loss, *batch, Aggregation(mode, normalizer=3))
        assert math.isfinite(value) and gradient.isfinite().all(), loss
        assert not any(math.isinf(number) for number in metrics.values()), (loss, metrics)


@given(batch=batches(ANY_FLOAT32, ANY_FLOAT32))
def test_even_anything_in_finite_out(batch):
    for loss in LOSSES:
        value, gradient, _ = run(loss, *batch)
        assert math.isfinite(value) and gradient.isfinite().all(), loss


@given(batch=batches(), junk=ANY_FLOAT32)
def test_masked_tokens_never_matter(batch, junk):
    *tensors, mask = batch
    with_junk = [torch.where(mask, tensor, junk) for tensor in tensors]
    for loss in LOSSES:
        before, after = run(loss, *tensors, mask), run(loss, *with_junk, mask)
        assert before[0] == after[0] and torch.equal(before[1], after[1]), loss


@given(batch=batches(), threshold=st.floats(1, 100))
def test_weights_are_bounded(batch, threshold):
    proximal, rollout, _, mask = batch
    for weights_of in (token_tis_weights, seq_mis_weights):
        weights = weights_of((proximal - rollout).nan_to_num(), mask, threshold)
        assert ((weights >= 0) & (weights <= threshold * (1 + 1e-6))).all() and not weights[~mask].any()
