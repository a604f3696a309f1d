"""Advantage estimators that verl's V1 trainer cannot compute: they need what it does not hand them."""

import inspect
from collections.abc import Iterator

from omegaconf import DictConfig

from verl_precision.base.errors import ConfigurationError

SETTING = "algorithm.adv_estimator"
# What `compute_advantage` (verl/trainer/ppo/ray_trainer.py) has for any estimator but gae and grpo, which it calls by
# themselves. V1's `_compute_advantage` (verl/trainer/ppo/v1/trainer_base.py) fetches nothing else.
HANDED = {"token_level_rewards", "response_mask", "config", "index"}
# Needed without a parameter of that name: gdpo finds each reward by its key, and V1 fetches their sum alone.
UNNAMED = {"gdpo": ("the parts of the reward, which algorithm.gdpo_reward_keys names",)}


def not_computable(config: DictConfig) -> Iterator[ConfigurationError]:
    """Yield the error of an estimator that is verl's or registered, and that lacks an input at the first step."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    name = str(config.algorithm.adv_estimator)
    estimator = ADV_ESTIMATOR_REGISTRY.get(name)
    if estimator is None or name in ("gae", "grpo") or not config.trainer.get("use_v1", True):
        return
    empty, extra = inspect.Parameter.empty, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(estimator).parameters.values()
    needed = [each.name for each in parameters if each.default is empty and each.kind is not extra]
    missing = [*(each for each in needed if each not in HANDED), *UNNAMED.get(name, ())]
    if missing:
        problem = f"verl's V1 trainer does not hand it {' and '.join(missing)}, and ends with the first rollout"
        remedy = "Choose another. trainer.use_v1=False, verl's older trainer, has what remax and gdpo need."
        raised = {"setting": SETTING, "value": name, "allowed": "an estimator that V1 computes, e.g. grpo or rloo"}
        yield ConfigurationError(problem, **raised, remedy=remedy)
