"""Every estimator preset composes on verl's config, passes verl's validation and our check, and says what it must."""

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import verl_precision.plugin  # noqa: F401
from verl_precision.presets import PRESETS_DIR, preset_names
from verl_precision.rules.book import find_faults
from verl_precision.rules.rule import Environment

ESTIMATORS = (
    "dapo grpo grpo_seq_mis grpo_token_tis grpo_unclipped gspo pg_seq_is pg_seq_mis pg_seq_tis ratio_one"
).split()


def composed(name: str, *more: str):
    return copy.deepcopy(cached(name, *more))


@functools.cache
def cached(name: str, *more: str):
    overrides = [
        "hydra.searchpath=[pkg://verl_precision.presets]",
        f"+estimator={name}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "data.max_response_length=20480",
        *more,
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    OmegaConf.resolve(config)
    return config


def test_the_promised_presets_are_there():
    assert preset_names("estimator") == ESTIMATORS


@pytest.mark.parametrize("name", ESTIMATORS)
def test_composes_and_is_valid(name):
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = composed(name)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert [str(fault) for fault in find_faults(config, Environment()) if fault.severity == "error"] == []
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode in POLICY_LOSS_REGISTRY
    if actor.loss_agg_mode == "seq-mean-token-sum-norm":
        assert actor.loss_scale_factor == 20480
    assert config.algorithm.rollout_correction.bypass_mode is name.startswith("pg_")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_value_has_its_source_and_the_preflight_is_installed(name):
    text = (PRESETS_DIR / "estimator" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    settings, _, callback = text.partition("hydra:\n")
    assert "_target_: verl_precision.integration.preflight.PreflightCallback" in callback
    for line in settings.splitlines():
        key, _, value = line.strip().partition(":")
        if key and value and not line.startswith("#"):
            assert " # " in line, f"{name}: {line.strip()} has no source"


def test_settings_of_the_papers():
    actor = composed("grpo").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    actor = composed("gspo").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (3e-4, 4e-4, "seq-mean-token-mean")
    dapo = composed("dapo")
    actor, buffer = dapo.actor_rollout_ref.actor, dapo.reward.reward_kwargs.overlong_buffer_cfg
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert actor.loss_agg_mode == "token-mean"
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    assert dapo.algorithm.filter_groups.enable and dapo.algorithm.filter_groups.metric == "acc"
    thresholds = {
        name: composed(name).actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_threshold
        for name in ("pg_seq_tis", "pg_seq_mis")
    }
    assert thresholds == {"pg_seq_tis": 3.0, "pg_seq_mis": 3.0}
    assert composed("grpo_seq_mis").algorithm.rollout_correction.rollout_is_threshold == 3.0


def test_interventions_differ_from_grpo_in_the_loss_only():
    grpo = composed("grpo")
    for name in ("grpo_unclipped", "ratio_one"):
        other = composed(name)
        assert other.actor_rollout_ref.actor.policy_loss.loss_mode == name
        for config in (grpo, other):
            config.actor_rollout_ref.actor.policy_loss.loss_mode = "-"
            config.actor_rollout_ref.actor.clip_ratio_low = config.actor_rollout_ref.actor.clip_ratio_high = 0
        assert other == grpo


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "dapo"])
def test_advantage_leaves_the_response_out_of_its_baseline(name):
    """Rewards 1, 0, 0, 2 of one group: A_i = R_i - mean of the others, not divided by a standard deviation."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0])
    estimator = get_adv_estimator_fn(composed(name).algorithm.adv_estimator)
    advantages, _ = estimator(
        token_level_rewards=rewards.unsqueeze(-1).clone(), response_mask=torch.ones(4, 1), index=np.array(["a"] * 4)
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1 - 2 / 3, -1.0, -1.0, 2 - 1 / 3]))


def test_short_responses_get_a_short_overlong_buffer():
    assert composed("dapo", "data.max_response_length=64").reward.reward_kwargs.overlong_buffer_cfg.len == 12


def test_docs_name_every_estimator_and_loss():
    text = (Path(__file__).parents[2] / "docs" / "math.md").read_text()
    for name in [*ESTIMATORS, "vp_gspo"]:
        assert f"`{name}`" in text, name
