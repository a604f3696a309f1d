"""The canary's judgement on made-up answers: what is healthy, what is not, and which replica."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.errors import ConfigurationError
from verl_precision.weight_sync.canary import FACTOR, FIRST_LIMIT, LEARNING_SYNCS, CanaryJudge, canary_tokens
from verl_precision.weight_sync.settings import CanarySettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRUTH = -torch.rand(2, 31, generator=torch.Generator().manual_seed(0)) * 10


def _noisy(size: float, seed: int = 1) -> torch.Tensor:
    return TRUTH + size * torch.randn(TRUTH.shape, generator=torch.Generator().manual_seed(seed))


def _judge(judge: CanaryJudge, *replicas: torch.Tensor, trainer: torch.Tensor = TRUTH):
    return judge.judge(dict.fromkeys(range(len(replicas)), trainer), dict(enumerate(replicas)))


def test_tokens_are_fixed_and_ordinary():
    tokens = canary_tokens(100, {0, 1, 99}, sequences=3, tokens=50)
    assert tokens.shape == (3, 50) and torch.equal(tokens, canary_tokens(100, {0, 1, 99}, 3, 50))
    assert not {0, 1, 99} & set(tokens.flatten().tolist())


def test_gap_and_first_bound_by_hand():
    """Two tokens, log π = -1 and -3, gaps 0.1 and 0.3: mean 0.2. Bound: 16 · 2⁻⁷ · (1 + 2) = 0.375."""
    trainer = torch.tensor([[-1.0, -3.0]])
    verdict = _judge(CanaryJudge(FP16, BF16), trainer + torch.tensor([[0.1, -0.3]]), trainer=trainer)
    assert math.isclose(verdict.gap, 0.2, rel_tol=1e-6)
    assert math.isclose(verdict.bound, FIRST_LIMIT * 2**-7 * 3, rel_tol=1e-6)
    assert verdict.problems == ()


def test_the_coarser_dtype_sets_the_bound():
    def bound(train, rollout):
        return _judge(CanaryJudge(train, rollout), TRUTH).bound

    assert bound(FP32, BF16) == bound(BF16, FP16) == bound(BF16, BF16) == 8 * bound(FP16, FP16)


def test_the_bound_is_learned_from_the_first_healthy_syncs():
    judge = CanaryJudge(BF16, BF16)
    noise = 0.05
    gaps = [_judge(judge, _noisy(noise, seed)).gap for seed in range(LEARNING_SYNCS)]
    verdict = _judge(judge, _noisy(noise, seed=9))
    assert math.isclose(verdict.bound, FACTOR * max(gaps), rel_tol=1e-6)
    assert verdict.problems == ()
    assert _judge(judge, _noisy(20 * noise)).problems


def test_an_unhealthy_sync_teaches_nothing():
    judge = CanaryJudge(BF16, BF16)
    for _ in range(3):
        assert _judge(judge, TRUTH + 5).problems
    first_bound = FIRST_LIMIT * 2**-7 * float(1 + TRUTH.abs().mean())
    assert math.isclose(_judge(judge, _noisy(0.01)).bound, first_bound, rel_tol=1e-6)


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


def test_the_wrong_replica_is_named():
    verdict = _judge(CanaryJudge(FP16, FP16), _noisy(1e-3), TRUTH + 1.0, _noisy(1e-3, seed=2))
    assert len(verdict.problems) == 1 and verdict.problems[0].startswith("replica 1: its served log-probs differ")


def test_a_replica_that_does_not_move_while_the_others_do_is_stale():
    """The policy moves by less than the bound: the gap alone would not show it."""
    judge = CanaryJudge(BF16, BF16)
    first = _noisy(0.001)
    assert _judge(judge, first, first).problems == ()
    moved = TRUTH + 0.3
    verdict = _judge(judge, moved + 0.001, first, trainer=moved)
    assert len(verdict.problems) == 1 and "replica 1: it answers as before this sync" in verdict.problems[0]


def test_nobody_is_stale_when_nobody_moves():
    """A learning rate of zero, or updates below the rollout's precision, leave every answer as it was."""
    judge = CanaryJudge(BF16, BF16)
    for _ in range(3):
        assert _judge(judge, TRUTH, TRUTH).problems == ()


def test_a_replica_that_comes_back_to_health_makes_no_other_stale():
    judge = CanaryJudge(BF16, BF16)
    assert _judge(judge, TRUTH, TRUTH + 3).problems
    assert _judge(judge, TRUTH, TRUTH).problems == ()


def test_noise_of_one_replica_is_not_a_move():
    """Another batch beside the canary changes last bits on one replica; the weights have not changed at all."""
    judge = CanaryJudge(BF16, BF16)
    assert _judge(judge, TRUTH, TRUTH).problems == ()
    assert _judge(judge, TRUTH, _noisy(0.003)).problems == ()


@given(st.floats(0.0, 0.3), st.integers(0, 10**6))
def test_noise_like_the_first_syncs_never_raises_an_alarm(size, seed):
    judge = CanaryJudge(BF16, BF16)
    for sync in range(20):
        assert _judge(judge, _noisy(size, seed + sync), _noisy(size, seed - sync - 1)).problems == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"every_n_syncs": -1},
            r"weight_sync\.canary\.every_n_syncs=-1: this cannot work. Allowed: greater than or equal to 0",
        ),
        ({"sequences": 0}, r"weight_sync\.canary\.sequences=0"),
        ({"tokens": 1}, r"weight_sync\.canary\.tokens=1: this cannot work. Allowed: greater than or equal to 2"),
        ({"tokens": True}, r"weight_sync\.canary\.tokens=True"),
        ({"action": "shout"}, r"weight_sync\.canary\.action='shout': this cannot work. Allowed: 'stop' or 'log'"),
        ({"timeout_seconds": 0}, r"weight_sync\.canary\.timeout_seconds=0: this cannot work. Allowed: greater than 0"),
        ({"timeout_seconds": float("nan")}, r"weight_sync\.canary\.timeout_seconds=nan"),
        (
            {"token": 3},
            r"weight_sync\.canary\.token=3: there is no such setting. Allowed: weight_sync\.canary\.every_n_syncs",
        ),
    ],
)
def test_settings_are_checked_before_anything_starts(values, message):
    with pytest.raises(ConfigurationError, match=message):
        CanarySettings.from_block(values)


def test_settings_have_defaults():
    assert CanarySettings.from_block(None) == CanarySettings()
