"""What is predicted is what drawn weights have, and what recorded runs had; every preset weighs as its config says."""

import json
import math
import runpy
from statistics import fmean

import pytest
import torch
from composer import compose_verl
from hypothesis import given, strategies

from verl_precision.losses.rollout_weights import geo_mask_weights, seq_mis_weights
from verl_precision.mismatch.prediction import predicted_spread, prediction_in_words, surviving_estimators, weighting_of
from verl_precision.presets import preset_names

OF_RESPONSES = {"pg_seq_is", "pg_seq_tis", "pg_seq_mis", "grpo_seq_mis", "geo_mask", "trm"}


def share_of(weights):
    return float((weights.sum(-1) ** 2 / weights.square().sum(-1) / weights.shape[-1]).mean())


@pytest.mark.parametrize("k3", [1e-5, 1e-3, 4e-3, 1.4e-2])
def test_shares_are_those_of_drawn_gaps_under_the_estimators_own_weights(k3):
    gaps = torch.randn(20_000, 130, generator=torch.Generator().manual_seed(0)).double() * math.sqrt(2 * k3) - k3
    drawn = {
        "pg_seq_tis": gaps.sum(-1).exp().clamp(max=3.0),
        "pg_seq_mis": seq_mis_weights(gaps, torch.ones_like(gaps), 3.0)[:, 0],
        "geo_mask": geo_mask_weights(gaps, torch.ones_like(gaps), "0.999_1.001")[:, 0],
        "trm": ((gaps.expm1() - gaps).amax(-1) <= 0.3).double(),
    } | ({"pg_seq_is": gaps.sum(-1).exp()} if k3 < 2e-3 else {})  # the tail of a full weight is not in 20,000 draws
    for name, weights in drawn.items():
        assert weighting_of(name).share(k3, 130) == pytest.approx(share_of(weights), abs=0.02), name


@given(strategies.floats(0, 10), strategies.floats(1, 1e6), strategies.sampled_from(["pg_seq_is", "pg_seq_tis", "trm"]))
def test_a_share_is_one_and_longer_responses_never_bring_an_estimator_back(k3, tokens, name):
    longer, share = (weighting_of(name).share(k3, length) for length in (2 * tokens, tokens))
    assert 0 <= longer <= share + 1e-9 <= 1 + 2e-9


@pytest.mark.parametrize("name", preset_names("estimator"))
def test_a_preset_weighs_as_its_composed_config(name):
    composed = weighting_of(compose_verl(f"+estimator={name}", "actor_rollout_ref.rollout.name=vllm"))
    assert composed[1:] == weighting_of(name)[1:] and (composed.kind != "token") == (name in OF_RESPONSES)


def test_weights_of_verls_own_are_read_where_verl_computes_them():
    for loss, bypass, kind in (("gpg", False, "cut"), ("gpg", True, "token"), ("bypass_mode", True, "cut")):
        correction = {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0", "bypass_mode": bypass}
        config = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": loss}}}}
        found = weighting_of(config | {"algorithm": {"rollout_correction": correction}})
        assert found.kind == kind and 0 < found.share(1e-3, 500) < 1


def test_what_survives_and_what_is_said():
    assert {*preset_names("estimator")} - {*surviving_estimators(1.92e-3, 32_768)} == OF_RESPONSES - {"trm"}
    lost, kept = prediction_in_words(1.92e-3, 2_048), prediction_in_words(3.08e-5, 2_048, "pg_seq_mis")
    assert "2.8 nats" in lost and "pg_seq_is" in lost and "precision=fp16" in lost and "fp16" not in kept
    assert "does not weigh whole responses" in prediction_in_words(1.92e-3, 2_048, weighting_of("grpo"))


@pytest.mark.parametrize(("name", "least", "most"), [("bf16", 0.9, 1.2), ("bf16_tis", 0.85, 1.1), ("fp16", 0.8, 1.1)])
def test_recorded_runs_have_the_spread_and_with_as_many_responses_the_share(root, name, least, most):
    recorded = root / "tests" / "mismatch" / "recorded" / "long_text" / f"{name}.jsonl"
    rows = [json.loads(line)["data"] for line in recorded.read_text().splitlines()]
    spreads = [predicted_spread(row["mismatch/k3_kl"], row["response_length/mean"]) for row in rows]
    ratios = [row["mismatch/sequence_log_ratio_std"] / spread for row, spread in zip(rows, spreads, strict=True)]
    assert least < min(ratios) and max(ratios) < most and 0.95 < fmean(ratios) < 1.05
    drawn = torch.randn(2_000, 128, generator=torch.Generator().manual_seed(0)) * fmean(spreads)
    shares = [row["mismatch/sequence_ess_fraction"] for row in rows]
    assert fmean(shares) == pytest.approx(share_of(drawn.exp()), abs=0.03)


def test_the_page_has_the_ratios_that_the_log_gives(root):
    script = runpy.run_path(str(root / "recipes" / "collapse" / "draw_prediction.py"))
    page = (root / "docs" / "log" / "prediction.md").read_text()
    assert script["table"](found := script["points"]()) in page and len(found) == 88
