"""The losses under verl's call: `actor.policy_loss.loss_mode=<name of POLICY_LOSSES>`.

verl calls a loss with `old_log_prob`, `log_prob`, `advantages`, `response_mask`, `loss_agg_mode`, `config`,
`rollout_is_weights`. Which policy `old_log_prob` belongs to depends on the run: that of θ' recomputed by the trainer,
or, in bypass mode, the rollout's. The worker is not told. So a loss that needs the rollout's asks for a marker in its
own config, which the presets tie to the setting that decides: `actor.policy_loss.rollout_correction.bypass_mode`.
"""

from types import ModuleType
from typing import Any

from torch import Tensor

from verl_precision.base.errors import ConfigurationError, RegistrationError
from verl_precision.integration.trainer.merged_metrics import MergedMetric, keep_merged_metrics, metrics_of_loss
from verl_precision.losses import settings as limits
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.registry import LossInputs, PolicyLoss, on_registration


def register_losses(core_algos: ModuleType) -> None:
    """Register every loss of `POLICY_LOSSES`, and those added later, with verl; once."""
    keep_merged_metrics()

    def register(name: str, entry: PolicyLoss) -> None:
        owner = core_algos.POLICY_LOSS_REGISTRY.get(name)
        if owner is None:
            core_algos.register_policy_loss(name)(AdaptedLoss(name, entry))
        elif not (isinstance(owner, AdaptedLoss) and owner.entry == entry):
            where = f"{getattr(owner, '__module__', '?')}.{getattr(owner, '__qualname__', owner)}"
            raise RegistrationError(
                f"policy loss {name!r} is already registered with verl by {where}",
                allowed="one owner per name",
                remedy="Remove the other package, or run without this one (VERL_USE_EXTERNAL_PLUGINS=none).",
            )

    if not any(isinstance(owner, AdaptedLoss) for owner in core_algos.POLICY_LOSS_REGISTRY.values()):
        on_registration(register)


class AdaptedLoss:
    """A loss of `POLICY_LOSSES` with verl's calling convention."""

    def __init__(self, name: str, entry: PolicyLoss) -> None:
        self.name, self.entry = name, entry

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, MergedMetric]]:
        """Call the loss with [B, T] tensors and verl's ActorConfig, whose `global_batch_info` `ppo_loss` has filled."""
        if config is None:
            raise ConfigurationError(
                f"policy loss {self.name!r} was called with config=None",
                allowed="verl's ActorConfig",
                remedy=f"Outside verl, call verl_precision.losses.POLICY_LOSSES[{self.name!r}].function with tensors.",
            )
        needs = self.entry.parameters
        if rollout_is_weights is not None and "rollout_is_weights" not in needs:
            raise ConfigurationError(
                "algorithm.rollout_correction.rollout_is made weights that this loss does not take",
                setting="actor_rollout_ref.actor.policy_loss.loss_mode",
                value=self.name,
                allowed="a loss that takes the weights, or no weights",
                remedy="Set algorithm.rollout_correction.rollout_is=null.",
            )
        if "rollout_log_probs" in needs:
            correction = config.policy_loss.get("rollout_correction", None) or {}
            limits.require_bypass(correction.get("bypass_mode", None), self.name)
        if loss_agg_mode == limits.NORM_MODE:
            limits.require_normalizer(config.loss_scale_factor)
        info = config.global_batch_info
        aggregation = Aggregation(
            mode=loss_agg_mode,
            normalizer=config.loss_scale_factor,
            num_responses=info.get("global_batch_size"),
            num_tokens=info.get("batch_num_tokens"),
            dp_size=info.get("dp_size") or 1,
        )
        inputs = LossInputs(log_prob, old_log_prob, advantages, response_mask, rollout_is_weights)
        output = self.entry(inputs, limits.LossSettings.from_config(config, needs), aggregation)
        return output.loss, metrics_of_loss(output.metrics)
