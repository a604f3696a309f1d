"""The canary's judgement on made-up answers: what is healthy, what is not, and which replica."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.base.errors import ConfigurationError
from verl_precision.weight_sync.canary import FACTOR, LEARNING_SYNCS, CanaryJudge, canary_tokens
from verl_precision.weight_sync.settings import CanarySettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRUTH = -torch.rand(2, 31, generator=torch.Generator().manual_seed(0)) * 10


UNIT = 2**-10 * (1 + float(TRUTH.abs().mean()))  # of FP16


def _noisy(size: float, seed: int = 1) -> torch.Tensor:
    return TRUTH + size * torch.randn(TRUTH.shape, generator=torch.Generator().manual_seed(seed))


def _judge(judge: CanaryJudge, *replicas: torch.Tensor, trainer: torch.Tensor = TRUTH):
    return judge.judge(dict.fromkeys(range(len(replicas)), trainer), dict(enumerate(replicas)))


def test_tokens_are_fixed_and_ordinary():
    tokens = canary_tokens(100, {0, 1, 99}, sequences=3, tokens=50)
    assert tokens.shape == (3, 50) and torch.equal(tokens, canary_tokens(100, {0, 1, 99}, 3, 50))
    assert not {0, 1, 99} & set(tokens.flatten().tolist())


@pytest.mark.parametrize(("train", "rollout", "grids", "bound"), [
    (FP16, BF16, (), 16 * 2**-7), (BF16, FP16, (), 16 * 2**-7), (FP16, FP16, (), 16 * 2**-10),
    (FP32, FP16, (), 16 * 2**-10),
    *((FP16, FP16, ("fp8", name), 0.15) for name in ("fp8", "fp8_e4m3", "int8_per_token_head")),
    (FP16, FP16, ("fp8", "fp8_e5m2"), 1 / 4),
    *((FP16, FP16, ("fp8", name), 1 / 2) for name in ("nvfp4", "int4_per_token_head", "turboquant_k8v4", "torchao")),
])  # fmt: skip
def test_gap_and_first_bound_by_hand(train, rollout, grids, bound):
    """Two tokens, log π = -1 and -3, gaps 0.01 and 0.03: mean 0.02. Bound: 16 · ε · (1 + 2), ε of the coarsest dtype or
    grid; of a grid at most 0.15 of 1 + 2, and one unit at least."""
    trainer = torch.tensor([[-1.0, -3.0]])
    verdict = _judge(CanaryJudge(train, rollout, grids=grids), trainer + torch.tensor([[0.01, -0.03]]), trainer=trainer)
    assert (verdict.gap, verdict.bound, verdict.problems) == (pytest.approx(0.02), pytest.approx(bound * 3), ())


def test_fp32_on_a_gpu_has_the_rounding_of_tf32():
    """On an H100 vLLM's FP32 was 4.7e-5 nats from the trainer's in good health: more than FP32's first bound there."""
    assert _judge(CanaryJudge(FP32, FP32), TRUTH + 4.7e-5).problems
    assert _judge(CanaryJudge(FP32, FP32, tf32=True), TRUTH + 4.7e-5).problems == ()


def test_the_bound_is_learned_from_healthy_syncs_alone():
    judge, noise = CanaryJudge(BF16, BF16), 0.05
    for _ in range(3):
        assert _judge(judge, TRUTH + 5).problems, "an unhealthy sync teaches nothing"
    gaps = [_judge(judge, _noisy(noise, seed)).gap for seed in range(LEARNING_SYNCS)]
    verdict = _judge(judge, _noisy(noise, seed=9))
    assert (verdict.bound, verdict.problems) == (pytest.approx(FACTOR * max(gaps)), ())
    assert _judge(judge, _noisy(20 * noise)).problems


@pytest.mark.parametrize(("tokens", "gap", "named"), [
    (62, 0.5, True),  # a change of all tokens, six times as large as the largest healthy gap
    (62, 0.35, False),
    (20, 3.0, False),  # in good health rounding may send some of them to another expert
    (20, 30.0, True),
])  # fmt: skip
def test_what_moves_most_tokens_is_measured_by_the_runs_own_gaps(tokens, gap, named):
    judge = CanaryJudge(FP16, FP16)
    for healthy in (0.01, 0.02, 0.01, 0.01, 0.01, 0.02, 0.04, 0.07, 0.01):  # it may grow, and nothing is forgotten
        assert _judge(judge, TRUTH + healthy * UNIT).problems == ()
    answer = TRUTH.clone()
    answer.view(-1)[:tokens] += gap * UNIT
    verdict = _judge(judge, answer)
    assert bool(verdict.problems) == named
    assert verdict.bound / UNIT == pytest.approx(6 * 0.07 if tokens == 62 else 4.0, rel=0.01)


def test_engines_that_agree_to_the_last_bits_do_not_have_to():
    judge = CanaryJudge(FP16, FP16)
    assert not any(_judge(judge, TRUTH).problems for _ in range(2 * LEARNING_SYNCS))
    assert _judge(judge, TRUTH + 0.09 * UNIT).problems == () and _judge(judge, TRUTH + UNIT).problems


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_answers_are_a_problem(bad):
    answer = TRUTH.clone()
    answer[1, 3] = bad
    verdict = _judge(CanaryJudge(BF16, BF16), answer)
    assert verdict.gap == math.inf and len(verdict.problems) == 1


def test_a_few_tokens_routed_to_another_expert_are_no_alarm():
    judge = CanaryJudge(FP16, FP16)
    for sync in range(20):
        answer = _noisy(1e-4, seed=sync)
        if sync > LEARNING_SYNCS:
            answer.view(-1)[3 * sync % 50 :][:6] += 0.5
        assert _judge(judge, answer).problems == ()
    assert _judge(judge, torch.where(torch.arange(31) % 4 == 0, TRUTH + 0.5, TRUTH)).problems, "one expert's tokens"


def test_a_replica_alone_that_does_not_move_while_the_trainer_does_is_stale_in_the_end():
    """Each update is within the rounding of a healthy rollout: they add up until none is as large."""
    judge, served = CanaryJudge(FP16, FP16), _noisy(0.001)
    named = [bool(_judge(judge, served, trainer=TRUTH + 0.7 * UNIT * sync).problems) for sync in range(5)]
    assert named == [False, False, False, True, True], "0.7, 1.4, 2.1 and 2.8 units; the limit is 2"
    assert _judge(judge, served + 0.001, trainer=TRUTH).problems == ()


@pytest.mark.parametrize(("before", "after"), [
    (TRUTH, TRUTH),  # a learning rate of zero, or updates below the rollout's precision, leave every answer as it was
    (TRUTH + 3, TRUTH),  # a replica comes back to health
    (TRUTH, _noisy(0.003)),  # another batch beside the canary changes last bits on one replica, and no weight
])  # fmt: skip
def test_nobody_is_stale_where_the_trainer_has_not_moved(before, after):
    judge = CanaryJudge(BF16, BF16)
    _judge(judge, TRUTH, before)
    assert _judge(judge, TRUTH, after).problems == ()


@given(st.floats(0.0, 0.3), st.integers(0, 10**6))
def test_noise_like_the_first_syncs_never_raises_an_alarm(size, seed):
    judge = CanaryJudge(BF16, BF16)
    for sync in range(20):
        assert _judge(judge, _noisy(size, seed + sync), _noisy(size, seed - sync - 1)).problems == ()


@pytest.mark.parametrize(("setting", "value"), [
    ("every_n_syncs", -1), ("sequences", 0), ("tokens", 1), ("tokens", True), ("action", "shout"),
    ("timeout_seconds", 0), ("timeout_seconds", math.nan), ("token", 3),
])  # fmt: skip
def test_settings_are_checked_before_anything_starts(setting, value):
    with pytest.raises(ConfigurationError) as caught:
        CanarySettings(**{setting: value})
    assert caught.value.setting == f"weight_sync.canary.{setting}" and caught.value.allowed
