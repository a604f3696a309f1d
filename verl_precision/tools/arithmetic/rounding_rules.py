"""The rule of stochastic rounding: what it needs of actor, rollout and transport."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import HALF
from verl_precision.base.verl_config import ROLLOUT, engines, rollout_dtype, sync_backend
from verl_precision.check.rules.rule import Environment, Fault, rule

ROUNDING = "weight_sync.rounding"


@rule("stochastic-rounding")
def stochastic_rounding(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Only this package's engine rounds weights at random, from FP32 to 16 bits."""
    if OmegaConf.select(config, ROUNDING) != "stochastic":
        return
    actor, rollout, backend = engines(config)[0], rollout_dtype(config), sync_backend(config)
    if not (actor.our_fsdp and actor.master == "fp32"):
        problem = f"the actor is verl's own engine, or holds its weights in {actor.master}: nothing would be rounded"
        instead = "Choose a precision preset (precision=fp32_train_bf16_rollout)"
    elif rollout not in HALF or config.actor_rollout_ref.rollout.get("quantization"):
        problem = f"weights are rounded to {' or '.join(HALF)}, and the rollout is quantised or holds {rollout}"
        instead = f"Set {ROLLOUT}.dtype to bfloat16 or float16"
    elif backend.startswith("delta"):
        problem = f"checkpoint_engine.backend={backend} sends differences of weights that verl rounds by itself"
        instead = "Choose another backend"
    else:
        return
    yield Fault(ROUNDING, problem, "nearest here", f"{instead}, or set {ROUNDING}=nearest.")
