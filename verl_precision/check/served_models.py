"""The models that verl serves beside the policy, and the dtype of each: a distillation's teachers, a reward model.

verl's YAML has one teacher, which takes the rollout's dtype. A teacher by another name has what its typed config says:
BF16, whatever the policy's rollout has.
"""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.verl_config import ROLLOUT


@dataclass(frozen=True)
class Served:
    """A model beside the policy that inference engines of its own serve: a teacher, or a reward model."""

    role: str
    setting: str  # path of its inference's config node
    named: str  # setting that names the model
    path: str | None  # its value
    engine: str
    dtype: str
    source: str  # where the dtype comes from


def served_models(config: DictConfig) -> list[Served]:
    """Return the models that verl will serve beside the policy."""
    found = []
    if teaches(config):
        teachers = dict(config.distillation.get("teacher_models") or {})
        if len(teachers) > 1:  # verl drops its own entry then
            teachers.pop("teacher_model", None)
        place = "distillation.teacher_models"
        for name in teachers:
            role = "teacher" if len(teachers) == 1 else f"teacher {name}"
            found.append(_served(config, role, f"{place}.{name}", "inference"))
    if OmegaConf.select(config, "reward.reward_model.enable"):
        found.append(_served(config, "reward model", "reward.reward_model", "rollout"))
    return found


def teaches(config: DictConfig) -> bool:
    """Return whether the run distils a teacher's log-probs into the policy."""
    return bool(OmegaConf.select(config, "distillation.enabled"))


def _served(config: DictConfig, role: str, owner: str, block: str) -> Served:
    setting = f"{owner}.{block}"
    node, name = OmegaConf.select(config, setting) or DictConfig({}), OmegaConf.select(config, f"{setting}.name")
    place, kwargs = f"{setting}.dtype", (node.get("engine_kwargs") or {}).get(name) or {}
    source = place if "dtype" in node else f"{place} (not set: BF16, whatever the policy's rollout has)"
    if "dtype" in node and OmegaConf.is_interpolation(node, "dtype"):
        source = f"{place} (as {ROLLOUT}.dtype)"
    if "dtype" in kwargs:
        source = f"{setting}.engine_kwargs.{name}.dtype"
    dtype = short(kwargs.get("dtype") or node.get("dtype") or "bf16")
    named = f"{owner}.model_path"
    return Served(role, setting, named, OmegaConf.select(config, named), str(name), dtype, source)
