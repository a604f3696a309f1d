"""Bounds of the settings, and contradictions between dtypes, said before a model loads."""

import math

import pytest
from verl.workers.config import FSDPEngineConfig

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.settings import LossScaleSettings, ShadowSettings
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig

MIXED = {"param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

BEYOND_BOUNDS = [
    *(("mode", "automatic"), ("growth_factor", 1.0), ("growth_interval", 2.5), ("backoff_factor", 1.0)),
    *(("initial", value) for value in (0, "65536", math.nan, 2.0**40)),
    *(("minimum", 0.0), ("minimum", 2.0**20), ("maximum", 2.0), ("maximum", 2.0**127)),
]


def config(**changes):
    return PrecisionFSDPConfig(**{"dtype": "float16", "mixed_precision": MIXED, **changes})


def test_a_typed_config_is_verls_with_more_fields():
    ours, theirs = config(), FSDPEngineConfig(dtype="float16", mixed_precision=MIXED)
    assert set(ours) > set(theirs) and all(ours[key] == theirs[key] for key in theirs)


CONTRADICTIONS = [
    ({"mixed_precision": None}, r"mixed_precision=None: .*silently.*bf16.*precision=fp16"),
    ({"mixed_precision": {"param_dtype": "fp16"}}, r"mixed_precision=.*Allowed: all of"),
    ({"mixed_precision": {**MIXED, "param_dtype": "fp61"}}, r"mixed_precision.param_dtype='fp61'.*'bf16', 'fp16'"),
    ({"dtype": "bfloat16"}, r"dtype='bfloat16'.*contradicts.*'fp16'"),
    ({"model_dtype": "fp16"}, r"model_dtype='fp16'.*Allowed: 'fp32'.*Adam"),
    ({"loss_scale": {"initial": 1.0}}, r"loss_scale=.*_target_"),
    ({"shadow": {"every_n_steps": 1}}, r"shadow=.*_target_.*ShadowSettings"),
    ({"learning_rate_ess_base": 1.5}, r"learning_rate_ess_base=1\.5.*Allowed: less than or equal to 1"),
    ({"log_prob_chunk_tokens": True}, r"log_prob_chunk_tokens=True.*Allowed: a valid integer"),
]
OF_A_SHADOW = [
    ({"ratio_source": "rollout"}, r"shadow.ratio_source='rollout'.*Allowed: 'training' or 'shadow'"),
    ({"every_n_steps": -1, "dtype": "bf16"}, r"shadow.every_n_steps=-1.*Allowed: greater than or equal to 0"),
    ({"every_n_steps": 1}, r"shadow.dtype=None. Allowed: bf16, fp16, fp32"),
    ({"ratio_source": "shadow", "dtype": "auto"}, r"shadow.dtype='auto'.*actor_rollout_ref.rollout.dtype"),
]


@pytest.mark.parametrize(("build", "settings", "message"), [
    *((LossScaleSettings, {name: value}, r"loss_scale\.\w+=.*Allowed: .*\.$") for name, value in BEYOND_BOUNDS),
    *((config, *row) for row in CONTRADICTIONS), *((ShadowSettings, *row) for row in OF_A_SHADOW),
])  # fmt: skip
def test_what_cannot_work_is_refused(build, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        build(**settings)


def test_shadow_is_off_by_default_whatever_the_rollouts_dtype():
    assert not ShadowSettings(dtype="auto").enabled and ShadowSettings(dtype="bf16", every_n_steps=10).enabled
