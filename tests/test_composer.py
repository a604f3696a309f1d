"""The short way to a config gives what the whole composition gives."""

import pytest
from composer import ROOT, compose_in_full, compose_recipe, compose_verl
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

SETTINGS = (
    *("actor_rollout_ref.rollout.dtype=bfloat16", "++actor_rollout_ref.model.override_config.attn_implementation=sdpa"),
    *("trainer.logger=[a,b]", "~actor_rollout_ref.rollout.top_p", "trainer.v1.trainer_mode=vp_sync"),
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp16,reduce_dtype:fp32}",
)


@pytest.mark.parametrize(("recipe", "choices"), [
    (None, ("model_engine=megatron",)),
    (None, ("+precision=fp16", "+scale=1x1_gpu", "+tiny_architecture=qwen3_rough")),
    ("recipes/moe/moe.yaml", ("precision=bf16", "estimator=grpo")),
])  # fmt: skip
def test_settings_on_top_of_composed_choices(recipe, choices):
    overrides = choices[0], *SETTINGS, *choices[1:]
    compose = compose_recipe if recipe else lambda _, *overrides, **kwargs: compose_verl(*overrides, **kwargs)
    short = compose(recipe, *overrides, return_hydra_config=True)
    whole = compose_in_full(recipe and ROOT / recipe, overrides)
    short.hydra.job.override_dirname = whole.hydra.job.override_dirname  # a folder's name, which nobody reads here
    assert OmegaConf.to_yaml(short) == OmegaConf.to_yaml(whole)


@pytest.mark.parametrize("setting", ["trainer.no_such=1", "+trainer.nnodes=3", "~trainer.no_such"])
def test_what_hydra_refuses_is_refused(setting):
    for compose in (compose_verl, lambda *overrides: compose_in_full(None, overrides)):
        with pytest.raises(ConfigCompositionException):
            compose(setting)
