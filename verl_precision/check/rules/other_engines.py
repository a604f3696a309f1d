"""Rules of training engines other than FSDP, and of rollouts other than vLLM: what does not hold there."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import PROMPT_LOG_PROBS, ROLLOUT, engines
from verl_precision.check.rules.rule import Environment, Faults, rule, told

# Arguments of torch's optimizers, and the field of Megatron's OptimizerConfig for each; None: it has none.
OF_MEGATRON = {"eps": "adam_eps", "betas": "adam_beta1 and adam_beta2", "fused": None, "foreach": None, "amsgrad": None}


@rule("megatron-optimizer")
def megatron_optimizer(config: DictConfig, environment: Environment) -> Faults:
    """verl hands `override_optimizer_config` to Megatron's OptimizerConfig, whose names are not torch's."""
    for engine in engines(config):
        if engine.strategy != "megatron" or not engine.trains:
            continue
        path = f"{engine.setting.rpartition('.')[0]}.optim"
        override = engine.optim.get("override_optimizer_config") or {}  # type: ignore[union-attr]
        for key in (key for key in override if key in OF_MEGATRON):
            setting, instead = f"{path}.override_optimizer_config.{key}", OF_MEGATRON[key]
            allowed = instead or "none of the kind"
            remedy = f"Leave it out (~{setting})" + (f", and set {instead} there." if instead else ".")
            yield told("megatron-optimizer", setting=setting, value=override[key], allowed=allowed, remedy=remedy)


@rule("veomni-half-weights")
def veomni_half_weights(config: DictConfig, environment: Environment) -> Faults:
    """VeOmni loads its weights in BF16 unless `mixed_precision` is True, and the optimizer updates them there."""
    for engine in engines(config):
        if engine.strategy == "veomni" and engine.trains and engine.master == "bf16":
            yield told("veomni-half-weights", setting=f"{engine.setting}.mixed_precision")


@rule("rollout-unverified", "warning")
def rollout_unverified(config: DictConfig, environment: Environment) -> Faults:
    """Only vLLM's workers compare the bits that arrived; and TensorRT-LLM's server cannot answer a canary."""
    name = str(config.actor_rollout_ref.rollout.name)
    if name == "vllm" or OmegaConf.select(config, "mismatch.enabled") is not True:
        return
    yield told("rollout-unverified", setting=f"{ROLLOUT}.name", name=name)
    asked = OmegaConf.select(config, "weight_sync.canary.every_n_syncs")
    if asked and name not in PROMPT_LOG_PROBS:
        yield told("rollout-unverified canary", name=name, value=asked)
