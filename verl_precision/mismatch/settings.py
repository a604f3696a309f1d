"""Settings of measuring: the block `mismatch` of a config; every preset of this package switches it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import ConfigurationError
from verl_precision.losses.settings import require_threshold
from verl_precision.mismatch.alarm_settings import AlarmSettings


@dataclass(frozen=True)
class MismatchSettings:
    """What is measured at every step, and what is done about it.

    Attributes:
        enabled: the one switch: False leaves verl's own trainer in place.
        ratio_threshold: C ≥ 1 of the shares of responses within C; the paper's is 3.
        histograms: of the log-prob gap, to the loggers that can show them (wandb, TensorBoard).
        alarm: when to speak up.
    """

    enabled: bool = True
    ratio_threshold: float = 3.0
    histograms: bool = True
    alarm: AlarmSettings = field(default_factory=AlarmSettings)

    def __post_init__(self) -> None:
        """Check what the alarm's settings have not checked themselves.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        for name in ("enabled", "histograms"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(
                    setting=f"mismatch.{name}",
                    value=getattr(self, name),
                    allowed="True or False",
                    remedy="Set one of them.",
                )
        require_threshold(self.ratio_threshold, "mismatch.ratio_threshold")

    @classmethod
    def from_block(cls, block: Mapping[str, Any] | None) -> MismatchSettings:
        """Return the settings of a config's block; what it leaves out has its default.

        Args:
            block: plain Python; None for no block.

        Raises:
            ConfigurationError: for a key there is none of, and for values out of bounds.
        """
        values = dict(block or {})
        alarm = dict(values.pop("alarm", None) or {})
        for name, given, kind in (("mismatch", values, cls), ("mismatch.alarm", alarm, AlarmSettings)):
            known = {f.name for f in fields(kind)}
            unknown = sorted(given.keys() - known)
            if unknown:
                raise ConfigurationError(
                    "there is no such setting",
                    setting=f"{name}.{unknown[0]}",
                    value=given[unknown[0]],
                    allowed=", ".join(sorted(known)),
                    remedy="Check the spelling.",
                )
        return cls(**values, alarm=AlarmSettings(**alarm))


def settings_of(config: DictConfig) -> MismatchSettings:
    """Return the typed settings of a config's block `mismatch`.

    Args:
        config: Composed config.

    Raises:
        ConfigurationError: for a block that cannot be used.
    """
    block = OmegaConf.select(config, "mismatch")
    return MismatchSettings.from_block(None if block is None else OmegaConf.to_container(block, resolve=True))  # type: ignore[arg-type]
