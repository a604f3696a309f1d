"""Limits, extremes, what is refused, and what holds for any numbers (by hypothesis).

Direct use: plain tensors, no verl.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_calls import PER_TOKEN, run
from plain_equations import Case, plain_gradient, random_case

from verl_precision import losses
from verl_precision.base.errors import ConfigurationError
from verl_precision.losses import POLICY_LOSSES, Aggregation
from verl_precision.losses.ratios import largest_ratio

LOSSES = [entry.function for entry in POLICY_LOSSES.values()]
WEIGHTS, ONE_EACH = [losses.token_tis_weights, losses.seq_mis_weights], [torch.zeros(1, 1)] * 2

MEAN = {"aggregation": Aggregation("seq-mean-token-mean")}
# Beyond what the batches of test_equations.py have. One response: loss, log-ratios, A, settings; its gradient.
BY_HAND = {
    # ρ = C exactly is kept: 1{ρ ≤ C}. Shown at 1, where exp is exact.
    "the threshold is inclusive": (losses.pg_seq_mis, [0], 1.0, {"threshold": 1.0}, [-1]),
    # r = 100: verl's vanilla loss is held at clip_ratio_c = 3, its gradient 0; equation (8) says slope rA.
    "grpo has no dual clip": (losses.grpo, [math.log(100)], -1.0, {}, [100]),
    # A < 0 and s > e^10: verl clamps the log-ratio at 10, and its gradient is gone.
    "gspo, s = e^11": (losses.gspo, [11], -1.0, MEAN, [math.exp(11)]),
    "gspo, s = e^40": (losses.gspo, [40], -1.0, MEAN, [math.exp(40)]),
    # mean log(μ/π) is 0.6 > δ = 0.5: with A > 0 the response is not dropped
    "left, A > 0": (losses.off_policy_sequence_mask, [-1, -0.2], 1.0, {}, [-math.exp(-1), -math.exp(-0.2)]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_one_response_by_hand(case):
    loss, log_ratios, advantage, settings, slopes = BY_HAND[case]
    trainer = torch.tensor([log_ratios], dtype=torch.float64)
    _, gradient, _ = run(loss, trainer, torch.zeros_like(trainer), [advantage], **settings)
    torch.testing.assert_close(gradient, torch.tensor([slopes], dtype=torch.float64), rtol=1e-10, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 4)])
def test_nothing_valid_gives_zero(loss, shape):
    junk = torch.full(shape, torch.nan)
    for mode in ("seq-mean-token-mean", "token-mean", "token-sum", "seq-mean-token-sum"):
        value, gradient, _ = run(loss, junk, junk, torch.zeros(shape), torch.zeros(shape), Aggregation(mode))
        assert value == 0 and not gradient.any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("where", ["trainer", "other", "advantages"])
def test_nonfinite_response_is_left_out_counted_and_in_the_denominator(loss, broken, where):
    torch.manual_seed(0)
    tensors = {name: torch.randn(3, 5) * 0.01 - 1 for name in ("trainer", "other", "advantages")}
    aggregation = Aggregation(normalizer=5)
    _, clean, _ = run(loss, *tensors.values(), aggregation=aggregation)
    tensors[where][1, 2] = broken
    value, gradient, metrics = run(loss, *tensors.values(), aggregation=aggregation)
    assert math.isfinite(value) and metrics["actor/nonfinite_responses"] == 1
    assert not gradient[1].any()
    assert torch.equal(gradient[[0, 2]], clean[[0, 2]]), "the others are as they were: N is still 3"


@pytest.mark.parametrize("loss", LOSSES)
def test_the_tokens_that_are_kept_are_those_with_a_gradient(loss):
    case = random_case(0, spread=1.0)
    trainer = case.trainer.clone().requires_grad_()
    output = loss(trainer, case.rollout, case.advantages, case.mask, aggregation=PER_TOKEN)
    output.loss.backward()
    assert torch.equal(output.kept, trainer.grad != 0)
    for mask in (output.clipped, output.truncated):
        assert mask is None or (mask.any() and not (mask & ~case.mask).any())
    assert output.clipped is None or not (output.clipped & output.kept).any()


def plain_slopes(loss, trainer, other, advantage=-1.0):
    """Return the gradient of the plain equation, of a sum over the tokens: the slope that no guard has held."""
    trainer, other = trainer.detach().double(), other.double()
    case = Case(trainer, other, other, torch.full((len(trainer),), advantage).double(), torch.ones_like(trainer).bool())
    scale = case.mask.sum() if loss is losses.cispo else len(trainer)
    return plain_gradient(loss.__name__, case, normalizer=1) * scale


@pytest.mark.parametrize("loss", LOSSES)
def test_guard_does_not_touch_what_is_in_range(loss):
    """Just below the guard, log-ratio 25 in float32 and 336 in float64: the slope is that of the plain formula."""
    for dtype, log_ratio in ((torch.float32, 25.0), (torch.float64, 336.0)):
        trainer = torch.full((1, 1), log_ratio, dtype=dtype)
        _, gradient, metrics = run(loss, trainer, torch.zeros_like(trainer), [-1.0])
        assert gradient.item() == pytest.approx(plain_slopes(loss, trainer, torch.zeros_like(trainer)).item(), rel=1e-5)
        assert metrics["actor/held_tokens"] == 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_made_whatever_the_ratio(loss, dtype):
    """Log-ratios of 46 and 1000 on a token, and on 3,072 of 4,096, through a model whose ∇log π has a norm of 1e3."""
    for log_ratio, tokens in ((46.0, 1), (1000.0, 1), (1000.0, 3072)):
        head = torch.nn.Linear(16, 8, dtype=dtype)
        torch.nn.init.zeros_(head.weight)
        trainer = head(torch.full((4, 1024, 16), 250.0, dtype=dtype)).float().log_softmax(-1)[..., 0]
        other = trainer.detach().clone()
        other.view(-1)[:tokens] -= log_ratio
        aggregation = Aggregation("seq-mean-token-sum")
        output = loss(trainer, other, torch.full((4, 1), -0.5), torch.ones(4, 1024), aggregation=aggregation)
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        assert norm.isfinite() and 0 < head.weight.grad.float().norm() < 1.01
        held = plain_slopes(loss, trainer, other, -0.5).abs() >= 0.5 * largest_ratio(torch.float32)
        assert output.values()["actor/held_tokens"] == held.sum()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("place", "tensor", "message"), [
    (0, torch.zeros(2, 3, dtype=torch.long), "trainer_log_probs is torch.int64"),
    (0, torch.zeros(3), r"trainer_log_probs has shape \(3,\)"),
    (1, torch.zeros(2, 4), r"has shape \(2, 4\), trainer_log_probs \(2, 3\)"),
    (1, None, "_log_probs is NoneType. Allowed: a floating-point tensor"),
    (2, [1.0, -1.0], r"advantages is list. Allowed: a floating-point tensor. Pass torch\.as_tensor\(advantages\)"),
    (2, torch.ones(2, 2), r"advantages has shape \(2, 2\).*\[responses, 1\]"),
    (3, [[1, 1, 1], [1, 1, 0]], "response_mask is list. Allowed: a tensor, nonzero where a token counts"),
])  # fmt: skip
def test_wrong_tensors_are_refused(loss, place, tensor, message):
    tensors = [torch.zeros(2, 3) for _ in range(4)]
    tensors[place] = tensor
    with pytest.raises(ConfigurationError, match=message):
        loss(*tensors, aggregation=PER_TOKEN)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_advantage_of_each_response_may_have_a_dimension_of_its_own(loss):
    trainer, other = torch.tensor([[-1.0, -2.0, -0.5], [-0.5, -0.1, -3.0]]), torch.full((2, 3), -1.2)
    value, gradient, _ = run(loss, trainer, other, [1.0, -1.0])
    for advantages in ([[1.0], [-1.0]], [[1.0] * 3, [-1.0] * 3]):
        again, its_gradient, _ = run(loss, trainer, other, advantages)
        assert again == pytest.approx(value, rel=1e-6, abs=1e-6) and torch.allclose(its_gradient, gradient, rtol=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("log_ratio", "message"), [(torch.zeros(2, 3).long(), "is torch.int64"), (torch.zeros(2, 4), r"shape \(2, 4\)")]
)
def test_wrong_log_ratios_are_refused(weights, log_ratio, message):
    with pytest.raises(ConfigurationError, match=message):
        weights(log_ratio, torch.ones(2, 3), 3.0)


@pytest.mark.parametrize("threshold", [-3.0, 0.55, "0.5_5", "3", None, True, math.nan, math.inf])
@pytest.mark.parametrize("loss", [losses.pg_seq_tis, losses.pg_seq_mis, *WEIGHTS])
def test_bad_threshold_is_refused(loss, threshold):
    tensors, aggregation = ([torch.zeros(1, 1)] * 4, {"aggregation": PER_TOKEN}) if loss in LOSSES else (ONE_EACH, {})
    with pytest.raises(ConfigurationError, match=r"threshold=.*Allowed: one number >= 1.*Set it to 3\.0"):
        loss(*tensors, threshold=threshold, **aggregation)


@pytest.mark.parametrize(("side", "value"), [("low", 0), ("low", 1.5), ("low", "0.2"), ("high", 0)])
@pytest.mark.parametrize("loss", [losses.grpo, losses.gspo])
def test_bad_clip_range_is_refused(loss, side, value):
    clip_range = {"clip_low": 0.2, "clip_high": 0.28, f"clip_{side}": value}
    with pytest.raises(ConfigurationError) as error:
        loss(*[torch.zeros(1, 1)] * 4, aggregation=PER_TOKEN, **clip_range)
    assert error.value.setting == f"actor_rollout_ref.actor.clip_ratio_{side}"


ANY_FLOAT32 = st.floats(allow_nan=True, allow_infinity=True, width=32)
FINITE_FLOAT32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
LOG_PROB = st.one_of(st.floats(-30, 0, width=32), st.floats(-1000, 0, width=32), FINITE_FLOAT32)
ADVANTAGE = st.one_of(st.floats(-5, 5, width=32), FINITE_FLOAT32)
MODES = st.sampled_from(["seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean"])


@st.composite
def batches(draw, log_prob=LOG_PROB, advantage=ADVANTAGE):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def matrix(values):
        return torch.tensor(draw(st.lists(values, min_size=rows * width, max_size=rows * width))).reshape(rows, width)

    return matrix(log_prob), matrix(log_prob), matrix(advantage), matrix(st.booleans())


@given(batch=st.one_of(batches(), batches(ANY_FLOAT32, ANY_FLOAT32)), mode=MODES)
def test_anything_in_finite_out(batch, mode):
    finite = all(tensor.isfinite().all() for tensor in batch)
    for loss in LOSSES:
        value, gradient, metrics = run(loss, *batch, Aggregation(mode, normalizer=3))
        assert math.isfinite(value) and gradient.isfinite().all(), loss
        assert not finite or not any(math.isinf(number) for number in metrics.values()), (loss, metrics)


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
    for weights_of in WEIGHTS:
        weights = weights_of((proximal - rollout).nan_to_num(), mask, threshold)
        assert ((weights >= 0) & (weights <= threshold * (1 + 1e-6))).all() and not weights[~mask].any()
