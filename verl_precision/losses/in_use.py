"""The loss of a run with its numbers, read of the whole config: what the decisions about its tokens depend on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import Self

from verl_precision.losses.clipping import clip_range
from verl_precision.losses.registry import POLICY_LOSSES, ratio_of
from verl_precision.losses.settings import LossSettings


@dataclass(frozen=True)
class LossInUse:
    """A loss and its numbers; plain, because it is kept with a run's tokens.

    Attributes:
        name: In words.
        loss: verl's `loss_mode`.
        bounds: Of `LossSettings`, those that are not left to the loss.
        against_rollout: Whether the loss is given the rollout's log-probs as the old ones (bypass mode); else the
            trainer's own, so that its ratio is 1.
        level: `rollout_is`, or None.
        level_threshold: Its threshold.
        clip: `ClipRange` of a loss of verl's own.
        beta_in_ratio: Whether the loss sees the trainer's log-probs, and not a shadow's.
        known: Whether the loss says where its tokens lose their gradient.
    """

    name: str
    loss: str
    bounds: Mapping[str, float] = field(default_factory=dict)
    against_rollout: bool = True
    level: str | None = None
    level_threshold: Any = None
    clip: tuple[bool, float, float, float] | None = None
    beta_in_ratio: bool = True
    known: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the loss of a composed config of verl's."""
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

    def settings(self) -> dict[str, Any]:
        """Return plain values; `LossInUse(**values)` is the same again."""
        return asdict(self)
