"""Bounds of the settings, and contradictions between dtypes, said before a model loads."""

import math

import pytest
from verl.workers.config import FSDPEngineConfig

from verl_precision.engine.settings import LossScaleSettings, ShadowSettings
from verl_precision.errors import ConfigurationError
from verl_precision.integration.engine_config import PrecisionFSDPConfig
from verl_precision.rules.book import find_faults
from verl_precision.rules.rule import Environment

MIXED = {"param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mode", "automatic"),
        ("initial", 0),
        ("initial", "65536"),
        ("initial", math.inf),
        ("initial", math.nan),
        ("initial", 2.0**40),
        ("growth_factor", 1.0),
        ("growth_interval", 0),
        ("growth_interval", 2.5),
        ("growth_interval", True),
        ("backoff_factor", 1.0),
        ("backoff_factor", -0.5),
        ("minimum", 0.0),
        ("minimum", 2.0**20),
        ("maximum", 2.0),
        ("maximum", 2.0**127),
        ("stop_after_steps_at_minimum", 0),
    ],
)
def test_bounds_of_the_loss_scale(setting, value):
    with pytest.raises(ConfigurationError, match=r"loss_scale\.\w+=.*Allowed: .*\.$"):
        LossScaleSettings(**{setting: value})


def test_static_scale_has_no_room():
    assert LossScaleSettings(mode="static", initial=128.0).bounds() == (128.0, 128.0)


def config(**changes):
    return PrecisionFSDPConfig(**{"dtype": "float16", "mixed_precision": MIXED, **changes})


def test_a_typed_config_is_verls_with_more_fields():
    ours, theirs = config(), FSDPEngineConfig(dtype="float16", mixed_precision=MIXED)
    assert set(ours) - set(theirs) == {
        "loss_scale",
        "fp32_log_probs",
        "log_prob_chunk_tokens",
        "fp32_output_head",
        "shadow",
        "send_weight_manifest",
    }
    assert all(ours[key] == theirs[key] for key in theirs)
    assert ours.compute_dtype == "fp16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixed_precision": None}, r"mixed_precision=None: .*silently.*bf16.*precision=fp16"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, r"mixed_precision=.*Allowed: all of"),
        ({"mixed_precision": {**MIXED, "param_dtype": "fp61"}}, r"param_dtype='fp61'. Allowed: bf16, fp16, fp32"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16'.*contradicts.*'fp16'"),
        ({"model_dtype": "fp16"}, r"model_dtype='fp16': .*Adam.*Allowed: fp32"),
        ({"loss_scale": {"initial": 1.0}}, r"loss_scale=.*_target_"),
        ({"shadow": {"every_n_steps": 1}}, r"shadow=.*_target_.*ShadowSettings"),
        ({"log_prob_chunk_tokens": 0}, r"log_prob_chunk_tokens=0. Allowed: an integer >= 1"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        config(**changes)


VLLM = "actor_rollout_ref.rollout.name=vllm"


@pytest.fixture
def refused(compose_verl):
    """What the rules of the engine say of a config."""

    def ask(*overrides: str) -> list[str]:
        faults = find_faults(compose_verl(VLLM, *overrides), Environment())
        return [f"{fault.setting}={fault.value!r}" for fault in faults if fault.name == "check_engines"]

    return ask


def test_rules_name_the_block(refused):
    assert refused() == []  # not ours: verl's business
    assert refused("+precision=fp16") == []
    for path in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
        assert refused("+precision=fp16", f"{path}.dtype=bfloat16") == [f"{path}.dtype='bfloat16'"]
    interval = "actor_rollout_ref.actor.fsdp_config.loss_scale.growth_interval"
    assert refused("+precision=fp16", f"{interval}=0") == [f"{interval}=0"]
    assert refused("+precision=fp16", f"+{interval}s=7") == [f"{interval}s=7"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio_source": "rollout"},
            r"shadow.ratio_source='rollout': this cannot work. Allowed: 'training' or 'shadow'",
        ),
        (
            {"every_n_steps": -1, "dtype": "bf16"},
            r"shadow.every_n_steps=-1: this cannot work. Allowed: greater than or equal to 0",
        ),
        (
            {"every_n_steps": True, "dtype": "bf16"},
            r"shadow.every_n_steps=True: this cannot work. Allowed: a valid integer",
        ),
        ({"every_n_steps": 1}, r"shadow.dtype=None. Allowed: bf16, fp16, fp32"),
        ({"ratio_source": "shadow", "dtype": "auto"}, r"shadow.dtype='auto'.*actor_rollout_ref.rollout.dtype"),
    ],
)
def test_shadow_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ShadowSettings(**settings)


def test_shadow_is_off_by_default_whatever_the_rollouts_dtype():
    assert not ShadowSettings().enabled and not ShadowSettings(dtype="auto").enabled
    assert ShadowSettings(dtype="bfloat16", every_n_steps=10).enabled
    assert ShadowSettings(dtype="bf16", ratio_source="shadow").enabled


def test_shadow_is_the_actors_alone_and_in_the_rollouts_dtype(refused):
    actor = "actor_rollout_ref.actor.fsdp_config.shadow"
    assert refused("+precision=fp32_train_bf16_rollout", f"{actor}.ratio_source=shadow") == []
    assert refused("+precision=bf16", f"{actor}.every_n_steps=1", f"{actor}.dtype=fp16") == [f"{actor}.dtype='fp16'"]
    assert refused("+precision=bf16", "critic.fsdp.shadow.every_n_steps=1") == ["critic.fsdp.shadow.every_n_steps=1"]
