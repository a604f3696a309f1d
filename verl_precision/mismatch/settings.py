"""Settings of measuring: the block `mismatch` of a config; every preset of this package switches it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from verl_precision.base.settings import settings
from verl_precision.losses.settings import require_threshold
from verl_precision.mismatch.alarm_settings import AlarmSettings


@settings("mismatch.{}".format)
class MismatchSettings:
    """What is measured at every step, and what is done about it.

    Attributes:
        enabled: False leaves verl's own trainer in place.
        ratio_threshold: C ≥ 1 of the shares of responses within C; the paper's is 3.
        histograms: Whether to give those of the log-prob gap, to the loggers that can show them (wandb, TensorBoard).
        alarm: When to speak up.
    """

    enabled: bool = Field(default=True, strict=True)
    ratio_threshold: float = Field(default=3.0, strict=True)
    histograms: bool = Field(default=True, strict=True)
    alarm: AlarmSettings = AlarmSettings()

    def __post_init__(self) -> None:
        """Check the bound of C as the losses do."""
        require_threshold(self.ratio_threshold, "mismatch.ratio_threshold")

    @classmethod
    def from_block(cls, block: Mapping[str, Any] | None) -> MismatchSettings:
        """Return the settings of a config's block, as plain Python; what it leaves out has its default.

        Raises:
            ConfigurationError: For a key there is none of, and for values out of bounds.
        """
        values = dict(block or {})
        alarm = AlarmSettings(**(values.pop("alarm", None) or {}))
        return cls(**values, alarm=alarm)


def settings_of(config: DictConfig) -> MismatchSettings:
    """Return the settings of a composed config's block `mismatch`.

    Raises:
        ConfigurationError: For a block that cannot be used.
    """
    block = OmegaConf.select(config, "mismatch")
    return MismatchSettings.from_block(None if block is None else OmegaConf.to_container(block, resolve=True))  # type: ignore[arg-type]
