"""Teachers and reward models are found, each with the dtype that verl gives it."""

from dataclasses import astuple

import pytest
from composer import compose_verl
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from verl_precision.base.dtypes import short
from verl_precision.check.served_models import served_models

ROLLOUT = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=float16")
TAUGHT = ("distillation.enabled=True", "distillation.n_gpus_per_node=2", "distillation.nnodes=1")
ONE = "distillation.teacher_models.teacher_model"


def named(name: str) -> tuple[str, ...]:
    given = ("model_path=owner/teacher", f"key={name}", "num_replicas=1", "inference.name=vllm")
    return tuple(f"+distillation.teacher_models.{name}.{each}" for each in given)


@pytest.mark.parametrize(("words", "dtypes"), [
    ((), {}),
    ((f"{ONE}.model_path=owner/teacher",), {"teacher": "fp16"}),  # verl's YAML refers to the rollout's
    ((f"{ONE}.model_path=owner/teacher", f"{ONE}.inference.dtype=bfloat16"), {"teacher": "bf16"}),
    (named("maths"), {"teacher": "bf16"}),  # verl's typed config does not, and its own entry is dropped
    ((*named("maths"), "+distillation.teacher_models.maths.inference.dtype=half"), {"teacher": "fp16"}),
])  # fmt: skip
def test_a_teachers_dtype_is_what_verl_builds(words, dtypes):
    config = compose_verl(*ROLLOUT, *(TAUGHT if words else ()), *words)
    assert {served.role: served.dtype for served in served_models(config)} == dtypes
    if words:
        (built,) = omega_conf_to_dataclass(config.distillation).teacher_models.values()
        assert [short(built.inference.dtype)] == list(dtypes.values())


def test_two_teachers_and_a_reward_model():
    judge = ("reward.reward_model.enable=True", "reward.reward_model.model_path=owner/judge")
    config = compose_verl(*ROLLOUT, *TAUGHT, *named("maths"), *named("code"), *judge)
    assert [served.role for served in served_models(config)] == ["teacher maths", "teacher code", "reward model"]
    for served in served_models(config):
        assert OmegaConf.select(config, served.named) == served.path
        assert served.dtype == "bf16" and served.setting in served.source, astuple(served)
