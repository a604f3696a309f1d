"""What verl's V1 trainer does not do, though a setting asks for it: those that its V0 trainers alone read."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, engines, lora_rank
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule

# Of verl 0.9.1: trainer_base.py `_compute_advantage` selects rewards, masks, groups, values and log-probs, and no more.
NOT_GIVEN = {
    "remax": "the rewards of greedy responses",
    "optimal_token_baseline": "the sum of squared probabilities of each token, which no engine computes",
    "tir_optimal_token_baseline": "the sum of squared probabilities of each token, which no engine computes",
    "gdpo": "the parts of the reward by their names",
}
INSTEAD = "grpo, rloo, gae, reinforce_plus_plus, ..."


def _is_v1(config: DictConfig) -> bool:
    return bool(config.trainer.get("use_v1", True))


@rule("advantage-not-computed")
def advantage_not_computed(config: DictConfig, environment: Environment) -> Faults:
    """An advantage estimator that needs what the V1 trainer does not give it ends in the first step."""
    name = str(config.algorithm.adv_estimator)
    if _is_v1(config) and name in NOT_GIVEN:
        problem = f"verl's V1 trainer does not give it {NOT_GIVEN[name]}: the first step fails"
        remedy = f"Choose another estimator of advantages: {INSTEAD}"
        yield Fault(setting="algorithm.adv_estimator", problem=problem, allowed=INSTEAD, remedy=remedy)


@rule("adapter-not-loaded")
def adapter_not_loaded(config: DictConfig, environment: Environment) -> Faults:
    """verl's FSDP engine builds an adapter where the rank is above 0, and loads one nowhere else."""
    setting = "actor_rollout_ref.model.lora_adapter_path"
    if OmegaConf.select(config, setting) and lora_rank(config) == 0 and engines(config)[0].strategy in FSDP:
        problem = "lora_rank is 0: the adapter is never loaded, and the whole model is trained"
        remedy = "Set actor_rollout_ref.model.lora_rank to the adapter's rank."
        yield Fault(setting=setting, problem=problem, allowed="null, or a lora_rank above 0", remedy=remedy)


@rule("prefix-grouper-unread", "warning")
def prefix_grouper_unread(config: DictConfig, environment: Environment) -> Faults:
    """Only verl's V0 trainers read it."""
    setting = "actor_rollout_ref.actor.use_prefix_grouper"
    if _is_v1(config) and OmegaConf.select(config, setting):
        problem = "verl's V1 trainer does not read it: prompts of a group are computed once for each response"
        yield Fault(setting=setting, problem=problem, allowed="False", remedy=f"Leave out {setting}.")
