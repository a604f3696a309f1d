"""What is said of a token is what the loss does with it: by hand, and against the papers' equations in float64."""

import inspect
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from composer import compose_estimator
from kept_responses import GRPO

from verl_precision.losses import POLICY_LOSSES
from verl_precision.losses.registry import LossInUse
from verl_precision.losses.rollout_weights import WEIGHT_KINDS
from verl_precision.losses.settings import ClipRange
from verl_precision.presets import preset_names
from verl_precision.tools.kept_tokens.decisions import LOST, Tokens, decide
from verl_precision.tools.kept_tokens.kept_file import DECISIONS

sys.path.append(str(Path(__file__).parents[2] / "losses"))
from plain_equations import case_for, plain_gradient, random_case

WEIGHED = {"grpo_token_tis": 2.0, "grpo_seq_mis": 3.0, "geo_mask": "0.999_1.001", "icepop": "0.5_5.0", "kpop": 0.1}
BY_NAME = {n: LossInUse(n, "vp_grpo", {}, False, f"vp_{n.removeprefix('grpo_')}", C) for n, C in WEIGHED.items()}
DIRECT = ("grpo", "gspo", "cispo", "pg_seq_tis", "pg_seq_mis", "dppo_tv", "dppo_kl", "off_policy_sequence_mask")
BY_NAME |= {name: LossInUse(name, f"vp_{name}") for name in DIRECT}
IN_BYPASS_MODE = ("grpo", "gspo", "cispo")
WEIGHTS = replace(BY_NAME["grpo_token_tis"], loss="vp_ratio_one", bounds={})


def tokens_of(gaps, advantage=1.0, mask=None, shadow=None) -> Tokens:
    mu = torch.full((len(gaps),), -3.0, dtype=torch.float64)
    shadow = None if shadow is None else mu + torch.tensor(shadow, dtype=torch.float64)
    ones = torch.ones(len(gaps), dtype=torch.int64)
    pi = mu + torch.tensor(gaps, dtype=torch.float64)
    return Tokens(pi, mu, advantage * ones.double(), ones if mask is None else torch.tensor(mask), shadow)


def said(estimator: LossInUse, tokens: Tokens, current=True, **more) -> list[str]:
    return [DECISIONS[code] for code in decide(estimator, tokens, current, weights_of(estimator, tokens), **more).codes]


def weights_of(estimator: LossInUse, tokens: Tokens):
    """Return the weights that verl's step makes by an estimator's level."""
    if estimator.level is None:
        return None
    kind, pair = WEIGHT_KINDS[estimator.level], (tokens.log_probs, tokens.rollout_log_probs)
    given = pair if kind.of_log_probs else (pair[0] - pair[1],)
    return kind.weights(*(each.unsqueeze(0) for each in (*given, tokens.mask)), estimator.level_threshold)[0]


@pytest.mark.parametrize(("gap", "advantage", "shadow", "current", "expected"), [  # ln 0.8 = -0.2231, ln 1.28 = 0.2469
    pytest.param(0.30, 1.0, None, True, "phantom-clipped", id="the same weights: the whole gap is rounding"),
    pytest.param(0.30, 1.0, None, False, "clipped", id="of older weights, and no shadow: nobody knows why"),
    pytest.param(0.30, 1.0, 0.28, True, "clipped", id="the policy's own change clips it"),
    pytest.param(0.30, 1.0, 0.20, False, "phantom-clipped", id="not without the rounding"),
    pytest.param(-0.30, -1.0, None, True, "phantom-clipped", id="A < 0"),
    pytest.param(0.30, -1.0, None, True, "kept", id="the wrong side"),
    pytest.param(0.30, 0.0, None, True, "kept", id="no advantage, no gradient to lose"),
    pytest.param(0.2468, 1.0, None, True, "kept", id="just inside"),
    pytest.param(0.2470, 1.0, None, True, "phantom-clipped", id="just outside"),
])  # fmt: skip
def test_clipping_by_hand(gap, advantage, shadow, current, expected):
    tokens = tokens_of([gap, 0.0], advantage, shadow=None if shadow is None else [shadow, 0.0])
    assert said(GRPO, tokens, current) == [expected, "kept"]
    stated = replace(GRPO, loss="vanilla", bounds={}, clip=tuple(ClipRange(False, math.log(0.8), math.log(1.28))))
    assert said(stated, tokens, current) == [expected, "kept"], "a loss of verl's own with this clip range"


def test_verls_dual_clip_and_a_ratio_that_is_one_outside_bypass_mode():
    stated = LossInUse("vanilla", "vanilla", clip=(False, -0.2, 0.2, math.log(3)))
    assert said(stated, tokens_of([1.0, 1.2], -1.0), False) == ["kept", "clipped"]
    assert said(replace(GRPO, against_rollout=False), tokens_of([0.5, -3.0])) == ["kept", "kept"]


@pytest.mark.parametrize(("name", "gaps", "expected"), [
    ("grpo_token_tis", [0.69, 0.70, -5.0], ["kept", "truncated", "kept"]),  # ln 2 = 0.693
    ("icepop", [0.0, 1.7, -0.7], ["kept", "masked", "masked"]),  # ln 5 = 1.609, ln 0.5 = -0.693
    ("grpo_seq_mis", [0.5, 0.5], ["kept", "kept"]),  # ln 3 = 1.0986
    ("grpo_seq_mis", [0.6, 0.6], ["masked", "masked"]),
    ("geo_mask", [0.0, 0.003], ["masked", "masked"]),
    ("geo_mask", [0.01, -0.01], ["kept", "kept"]),
    ("pg_seq_tis", [0.6, 0.6], ["truncated", "truncated"]),
    ("pg_seq_mis", [0.6, 0.6], ["masked", "masked"]),
    ("gspo", [0.01, -0.008], ["phantom-clipped"] * 2),  # the mean is 1e-3, ln 1.0004 = 4e-4
    ("gspo", [0.01, -0.01], ["kept", "kept"]),
    ("cispo", [1.7, 1.8], ["kept", "truncated"]),  # ln 6 = 1.792
    ("dppo_tv", [1.3, 1.8], ["kept", "masked"]),  # e^-1.7 - e^-3 = 0.133, e^-1.2 - e^-3 = 0.251
    ("kpop", [0.5, 3.0], ["kept", "masked"]),
])  # fmt: skip
def test_other_bounds_by_hand(name, gaps, expected):
    assert said(BY_NAME[name], tokens_of(gaps)) == expected


def test_a_rejected_response_is_masked_before_it_is_clipped():
    mask = BY_NAME["off_policy_sequence_mask"]
    assert said(mask, tokens_of([-0.6, -0.6], -1.0), False) == ["masked", "masked"]
    assert said(mask, tokens_of([-0.4, -0.1], -1.0), False) == ["clipped", "kept"]
    assert said(mask, tokens_of([-0.6, -0.6], 1.0), False) == ["kept", "kept"]


def test_tool_output_is_not_the_policys_and_a_number_that_is_none_leaves_a_response_out():
    expected = ["phantom-clipped", "not the policy's", "phantom-clipped"]
    assert said(GRPO, tokens_of([0.3, math.nan, 0.3], mask=[1, 0, 1])) == expected
    assert said(GRPO, tokens_of([0.0, math.nan])) == ["masked", "masked"]


def test_what_verls_rejection_took_out_is_masked_and_its_weights_are_taken():
    tokens = tokens_of([0.0, 0.0, 0.7], mask=[1, 1, 1])
    weights = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    assert said(WEIGHTS, tokens, left=torch.tensor([1, 0, 1])) == ["kept", "masked", "truncated"]
    given = decide(WEIGHTS, tokens, True, weights)
    assert [DECISIONS[code] for code in given.codes] == ["kept", "masked", "truncated"]
    assert given.slopes.tolist() == [1, 0, 2]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BY_NAME)
def test_who_is_said_to_have_lost_its_gradient_has_none_and_nobody_else(name, seed):
    """Against the papers' equations under automatic differentiation, which share no code with the losses."""
    case = random_case(seed, spread=1.5) if name == "cispo" else case_for(name, seed)
    other = BY_NAME[name]
    case = replace(case, proximal=case.rollout if other.against_rollout else case.trainer)
    gradient, found, scales = plain_gradient(name, case).numpy(), set(), []
    for row in range(len(case.mask)):
        if not case.mask[row].any():
            continue
        advantages = case.advantages[row].expand(case.mask.shape[1])
        tokens = Tokens(case.trainer[row], case.rollout[row], advantages, case.mask[row])
        decided = decide(other, tokens, False, weights_of(other, tokens))
        mask = case.mask[row].numpy()
        lost, slopes = np.isin(decided.codes, LOST), decided.slopes
        assert (lost == (mask & (gradient[row] == 0))).all()
        assert ((decided.codes == DECISIONS.index("not the policy's")) == ~mask).all()
        length = mask.sum() if name == "gspo" else 1
        kept = mask & ~lost
        scales += (gradient[row][kept] * length / slopes[kept]).tolist()
        found |= {DECISIONS[code] for code in decided.codes}
    assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-5), "the gradient's, but for aggregation"
    assert found & {"clipped", "masked", "truncated"}, "the case decides something"


def test_any_registered_loss_can_be_asked():
    """Its own gradient decides, so that a loss that somebody adds needs nothing more."""
    for name, entry in POLICY_LOSSES.items():
        bounds = {"threshold": 3.0, "rejection_threshold": 0.5, "clip_low": 0.2, "clip_high": 0.28}
        given = {key: value for key, value in bounds.items() if key in entry.parameters}
        assert len(said(LossInUse(name, name, given), tokens_of([0.1, 0.2]))) == 2
    assert said(LossInUse("mine", "mine", known=False), tokens_of([0.5, 0.5])) == ["not known"] * 2


@pytest.mark.parametrize("preset", preset_names("estimator"))
def test_every_preset_is_known_and_those_above_are_the_presets(preset):
    found = LossInUse.from_config(compose_estimator(preset))
    assert found.known
    if preset not in BY_NAME:
        return
    other = BY_NAME[preset]
    assert (found.loss, found.level, found.level_threshold) == (other.loss, other.level, other.level_threshold)
    assert found.against_rollout == (other.against_rollout and preset not in IN_BYPASS_MODE)
    defaults = inspect.signature(POLICY_LOSSES[found.loss].function).parameters
    assert found.bounds == {name: defaults[name].default for name in found.bounds}, "the loss has the preset's numbers"


def test_of_verls_own_losses_those_are_known_that_state_their_range():
    def of(loss, **correction):
        actor = {"policy_loss": {"loss_mode": loss}, "clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28}
        config = {"actor_rollout_ref": {"actor": actor}, "algorithm": {"rollout_correction": correction}}
        return LossInUse.from_config(config)

    dual = ClipRange(False, math.log1p(-0.2), math.log1p(0.28), math.log(3))
    assert of("vanilla", bypass_mode=True).known and of("vanilla", bypass_mode=True).clip == dual
    assert not of("clip_cov").known and not of("cispo").known
    assert of("bypass_mode", bypass_mode=True).known
    assert not of("bypass_mode", bypass_mode=True, rollout_rs="token_k2").known
