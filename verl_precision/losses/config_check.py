"""Does a composed config give the chosen loss what its equation needs? Asked before Ray or a model starts."""

from omegaconf import DictConfig

from verl_precision.aggregation import NORM_MODE, require_normalizer
from verl_precision.errors import ConfigurationError
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.settings import (
    THRESHOLD,
    WEIGHT_THRESHOLD,
    require_clip_range,
    require_threshold,
)

BYPASS = "algorithm.rollout_correction.bypass_mode"
WEIGHTS = ("vp_token_tis", "vp_seq_mis")


def check_estimator(config: DictConfig) -> None:
    """Require the settings that belong together for a loss or weights of this package; verl's own are not looked at.

    Args:
        config: the composed config of `ppo_trainer`.

    Raises:
        ConfigurationError: the first contradiction: setting, value, what is allowed, what to do.
    """
    actor = config.actor_rollout_ref.actor
    name = actor.policy_loss.get("loss_mode", "vanilla")
    entry = POLICY_LOSSES.get(name)
    if config.algorithm.get("rollout_correction", {}).get("rollout_is") in WEIGHTS:
        _check_weights(config, name)
    if entry is None:
        return
    if actor.loss_agg_mode == NORM_MODE:
        require_normalizer(actor.get("loss_scale_factor"))
    if "clip_low" in entry.parameters:
        require_clip_range(actor.clip_ratio_low, actor.clip_ratio_high)
    if "threshold" in entry.parameters:
        correction = actor.policy_loss.get("rollout_correction") or {}
        require_threshold(correction.get("rollout_is_threshold"), THRESHOLD)
    if "rollout_log_probs" in entry.parameters:
        _check_bypass(config, name)


def _check_bypass(config: DictConfig, name: str) -> None:
    correction = config.algorithm.get("rollout_correction") or {}
    bypass = correction.get("bypass_mode", False)
    remedy = f"Choose the preset estimator={name}, which sets both."
    if bypass is not True:
        raise ConfigurationError(
            f"{BYPASS}={bypass!r} with loss_mode={name}: this loss weighs by the rollout's log-probs; verl would "
            f"recompute the old ones with the trainer. Allowed: True. {remedy}"
        )
    marker = (config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {}).get("bypass_mode")
    if marker is not True:
        raise ConfigurationError(
            f"actor.policy_loss.rollout_correction.bypass_mode={marker!r} with loss_mode={name}: it tells the worker "
            f"whose log-probs it is given. Allowed: ${{{BYPASS}}}. {remedy}"
        )
    if not config.trainer.get("use_v1", True):
        raise ConfigurationError(
            f"trainer.use_v1=False with loss_mode={name}: in bypass mode verl's V0 trainer replaces the loss by its "
            "own bypass_mode. Allowed: True. Set trainer.use_v1=True."
        )
    _require_rollout_log_probs(config, f"loss_mode={name}")


def _check_weights(config: DictConfig, name: str) -> None:
    correction = config.algorithm.rollout_correction
    level = correction.rollout_is
    chosen = f"algorithm.rollout_correction.rollout_is={level}"
    require_threshold(correction.rollout_is_threshold, WEIGHT_THRESHOLD)
    entry = POLICY_LOSSES.get(name)
    if entry is None or "rollout_is_weights" not in entry.parameters:
        takers = ", ".join(n for n, e in POLICY_LOSSES.items() if "rollout_is_weights" in e.parameters)
        raise ConfigurationError(
            f"actor.policy_loss.loss_mode={name} with {chosen}: this loss does not apply the weights as the equation "
            f"says. Allowed: {takers}. Set actor.policy_loss.loss_mode=grpo."
        )
    if correction.bypass_mode:
        raise ConfigurationError(
            f"{BYPASS}=True with {chosen}: in bypass mode verl makes no weights, without a word. Allowed: False. Set "
            "it to False, or choose estimator=pg_seq_tis or pg_seq_mis, which need no old-log-prob forward."
        )
    if correction.get("rollout_rs") is not None:
        raise ConfigurationError(
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} with {chosen}: it takes rejected tokens "
            "out of the mask, so that they leave the denominator. Allowed: null. Set it to null."
        )
    if correction.get("rollout_is_batch_normalize"):
        raise ConfigurationError(
            f"algorithm.rollout_correction.rollout_is_batch_normalize=True with {chosen}: normalised weights are not "
            "those of the equation. Allowed: False. Set it to False."
        )
    _require_rollout_log_probs(config, chosen)


def _require_rollout_log_probs(config: DictConfig, chosen: str) -> None:
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ConfigurationError(
            f"actor_rollout_ref.rollout.calculate_log_probs=False with {chosen}: the rollout's log-probs are missing. "
            "Allowed: True. Set actor_rollout_ref.rollout.calculate_log_probs=True."
        )
