"""The policy losses by name, the decorator that adds one, and the loss that a config chooses.

A loss names its inputs by its parameters, and `POLICY_LOSSES["vp_grpo"](batch, aggregation)` passes exactly these:

    trainer_log_probs     log π(θ), required, receives the gradient
    rollout_log_probs     log μ(θ'): the run must be in bypass mode
    proximal_log_probs    log π(θ'): verl's old-log-prob forward
    advantages, response_mask, aggregation
    threshold             C, `actor.policy_loss.rollout_correction.rollout_is_threshold`
    rejection_threshold   δ, `actor.policy_loss.rollout_correction.rollout_rs_threshold`
    clip_low, clip_high   `actor.clip_ratio_low`, `actor.clip_ratio_high`
    (every loss)          β of `gap_penalty`, `actor.policy_loss.dro_beta`
    rollout_is_weights    weights of verl's rollout-correction step, or None
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Self

from verl_precision.base.errors import ConfigurationError, RegistrationError
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.gap_penalty import gap_penalty as penalty_of_gap
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.settings import NO_RATIO, VERLS_RATIOS, LossSettings, Ratio, clip_range

# Equations name verl's one tensor `old_log_prob` by the policy that the ratio divides by.
OLD_LOG_PROBS = ("rollout_log_probs", "proximal_log_probs")
Loss = Callable[..., LossOutput]


class LossInputs(NamedTuple):
    """The tensors that a host passes to a loss, [B, T] each."""

    trainer_log_probs: Tensor
    old_log_probs: Tensor  # the trainer's at θ', or the rollout's in bypass mode
    advantages: Tensor
    response_mask: Tensor
    rollout_is_weights: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors by the names of a loss's parameters; the old log-probs have both of theirs."""
        return {**self.tensors(), **dict.fromkeys(OLD_LOG_PROBS, self.old_log_probs)}

    def of_all(self, function: Callable[[Tensor], Tensor]) -> "LossInputs":
        """Return the inputs with a function applied to each tensor."""
        return self._replace(**{name: function(tensor) for name, tensor in self.tensors().items()})


PARAMETERS = frozenset({*LossInputs._fields, *OLD_LOG_PROBS, "aggregation"} - {"old_log_probs"})
PARAMETERS |= {field.name for field in fields(LossSettings)}


@dataclass(frozen=True)
class PolicyLoss:
    """An entry of the registry."""

    function: Loss
    summary: str
    equation: str
    ratio: Ratio | None = None  # None if its author does not state it

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names of the function's parameters."""
        return frozenset(inspect.signature(self.function).parameters)

    @cached_property
    def required(self) -> frozenset[str]:
        """The names of the parameters without a default."""
        parameters = inspect.signature(self.function).parameters
        return frozenset(name for name, parameter in parameters.items() if parameter.default is parameter.empty)

    def __call__(
        self, batch: Mapping[str, Tensor], aggregation: Aggregation, gap_penalty: float | None = None, **options: float
    ) -> LossOutput:
        """Call the function with those of the batch's tensors that it takes.

        Args:
            batch: Tensors [B, T] by the names of this module's docstring. A loss takes what it needs.
            aggregation: How token values become a loss. docs/other_frameworks.md has an example.
            gap_penalty: β of `losses/gap_penalty.py`, which is added to the loss; None: nothing is added.
            options: Numbers of the loss: `threshold`, `clip_low` and others.

        Raises:
            ConfigurationError: If the loss needs a tensor that is not there.
        """
        offered = {**batch, "aggregation": aggregation}
        old = next((name for name in OLD_LOG_PROBS if name in self.parameters), OLD_LOG_PROBS[0])
        needed = {*self.required, *((old, "response_mask") if gap_penalty is not None else ())}
        if missing := sorted(needed - {*offered}):
            problem, allowed = f"{self.function.__name__} needs {missing[0]}", ", ".join(sorted(batch))
            raise ConfigurationError(problem, allowed=f"{missing[0]} [B, T]; there are {allowed}", remedy="Pass it.")
        given = {name: value for name, value in offered.items() if name in self.parameters}
        output = self.function(**given, **options)
        if gap_penalty is None:
            return output
        policies = batch["trainer_log_probs"], batch[old], batch["response_mask"]
        added = penalty_of_gap(*policies, aggregation=aggregation, beta=gap_penalty)
        return output._replace(loss=output.loss + added.loss).adding(added.metrics)


_losses: dict[str, PolicyLoss] = {}
_listeners: list[Callable[[str, PolicyLoss], None]] = []

POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(_losses)
"""Name (verl's `actor.policy_loss.loss_mode`) -> entry; read-only, see `policy_loss`."""


def policy_loss(name: str, summary: str, equation: str, ratio: Ratio | None = None) -> Callable[[Loss], Loss]:
    """Add a loss to `POLICY_LOSSES`, so that `actor.policy_loss.loss_mode=<name>` chooses it.

    verl must import your module in every process: set `VERL_USE_EXTERNAL_MODULES=your_module`. CONTRIBUTING.md has
    an example.

    Args:
        name: Value of `loss_mode` in a config; the names of this package's losses begin with vp_.
        summary: One line for a list of losses.
        equation: Source: paper and equation.
        ratio: The denominator of its ratio, and its clip. Without it there are no `phantom/...` metrics of clipping.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        RegistrationError: If the name is taken, or an unknown parameter has no default.
    """

    def add(function: Loss) -> Loss:
        entry = PolicyLoss(function, summary, equation, ratio)
        if not {"trainer_log_probs"} <= entry.required <= PARAMETERS:
            problem = f"policy loss {name!r} takes ({', '.join(inspect.signature(function).parameters)})"
            allowed = f"trainer_log_probs, and any of {', '.join(sorted(PARAMETERS))}; others need a default"
            raise RegistrationError(problem, allowed=allowed, remedy="Rename the others.")
        taken = _losses.get(name)
        if taken is not None and taken.function is not function:
            problem = f"policy loss {name!r} is {taken.function.__module__}.{taken.function.__qualname__} already"
            raise RegistrationError(problem, allowed="one loss per name", remedy="Rename yours.")
        for listener in _listeners:
            listener(name, entry)
        _losses[name] = entry
        return function

    return add


def on_registration(listener: Callable[[str, PolicyLoss], None]) -> None:
    """Call `listener(name, entry)` for every loss, whether it is registered already or later."""
    if listener not in _listeners:
        _listeners.append(listener)
        for name, entry in _losses.items():
            listener(name, entry)


def ratio_of(actor: Mapping[str, Any]) -> Ratio | None:
    """Return the ratio of the loss that a config's `actor_rollout_ref.actor` chooses; None if it is unknown."""
    settings = actor.get("policy_loss") or {}
    name = settings.get("loss_mode", "vanilla")
    if name == "bypass_mode" and (settings.get("rollout_correction") or {}).get("loss_type") == "reinforce":
        return NO_RATIO
    ours = POLICY_LOSSES.get(name)
    return VERLS_RATIOS.get(name) if ours is None else ours.ratio


@dataclass(frozen=True)
class LossInUse:
    """The loss of a run with the settings that decide about its tokens; plain values, stored with the tokens."""

    name: str  # for readers
    loss: str  # verl's `loss_mode`
    bounds: Mapping[str, float] = field(default_factory=dict)  # those of `LossSettings` that are set
    against_rollout: bool = True  # whether the old log-probs are the rollout's (bypass mode)
    level: str | None = None  # `rollout_is`, and its threshold
    level_threshold: Any = None
    clip: tuple[bool, float, float, float] | None = None  # `ClipRange` of one of verl's losses
    beta_in_ratio: bool = True  # whether the loss uses the trainer's log-probs, not a shadow's
    known: bool = True  # whether the loss states where its tokens lose their gradient

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the loss of a composed verl config."""
        actor = config["actor_rollout_ref"]["actor"]
        correction = config["algorithm"].get("rollout_correction") or {}
        shadow = (actor.get("fsdp_config") or {}).get("shadow") or {}
        loss, bypass = actor["policy_loss"].get("loss_mode", "vanilla"), bool(correction.get("bypass_mode"))
        level = None if bypass else correction.get("rollout_is")
        entry, ratio = POLICY_LOSSES.get(loss), ratio_of(actor)
        bounds, clip, known = {}, None, True
        if entry is not None:
            bounds = LossSettings.from_config(actor, entry.parameters).arguments()
        else:
            clip = clip_range(ratio, actor) if ratio is not None else None
            by_itself = loss == "bypass_mode" and (correction.get("rollout_is") or correction.get("rollout_rs"))
            known = clip is not None and loss != "clip_cov" and not by_itself
        name = loss.removeprefix("vp_") + (f" with {level.removeprefix('vp_')}" if level else "")
        if bypass and not (entry is not None and "rollout_log_probs" in entry.parameters):
            name += ", bypass mode"
        threshold, from_shadow = correction.get("rollout_is_threshold"), shadow.get("ratio_source") == "shadow"
        return cls(name, loss, bounds, bypass, level, threshold if level else None, clip, not from_shadow, known)
