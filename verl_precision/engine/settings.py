"""Settings of the loss scale and of the shadow forward, with bounds."""

import math
from dataclasses import dataclass

from verl_precision.errors import ConfigurationError

MODES = ("dynamic", "static")
RATIO_SOURCES = ("training", "shadow")

# What verl's PrecisionType understands, as verl's YAML spells it in `mixed_precision` and in `dtype`.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LONG_NAMES = {long: short for short, long in DTYPES.items()}


@dataclass(frozen=True)
class LossScaleSettings:
    """How the loss is scaled when the forward computes in FP16; without effect in BF16 and FP32.

    Attributes:
        mode: `dynamic` (scale grows and backs off) or `static` (stays at `initial`; overflowing steps are skipped).
        initial: S of the first step. 2^16 is verl's and torch's.
        growth_factor: S ← S·growth_factor after `growth_interval` consecutive updates without overflow; > 1.
        growth_interval: optimizer steps; 400 is what verl hard-wires.
        backoff_factor: S ← S·backoff_factor after an overflow; in (0, 1).
        minimum: S never falls below it.
        maximum: S never rises above it. With all gradients zero nothing overflows, and an unbounded S would reach inf
            and stay there.
        stop_after_steps_at_minimum: consecutive overflowing steps with S at its minimum after which the run stops.
    """

    mode: str = "dynamic"
    initial: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int = 400
    backoff_factor: float = 0.5
    minimum: float = 1.0
    maximum: float = 2.0**32
    stop_after_steps_at_minimum: int = 10

    def __post_init__(self) -> None:
        """Check the bounds of every setting.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        if self.mode not in MODES:
            raise _refused("mode", self.mode, " or ".join(MODES), "Dynamic suits every run.")
        for name in ("initial", "growth_factor", "backoff_factor", "minimum", "maximum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _refused(name, value, "a positive finite number", "Powers of two scale without rounding.")
        for name in ("growth_interval", "stop_after_steps_at_minimum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _refused(name, value, "an integer >= 1, in optimizer steps", "Leave it out for the default.")
        if self.growth_factor <= 1:
            raise _refused("growth_factor", self.growth_factor, "> 1", "Set mode=static for a scale that never grows.")
        if self.backoff_factor >= 1:
            raise _refused("backoff_factor", self.backoff_factor, "in (0, 1)", "Torch's own is 0.5.")
        if not self.minimum <= self.initial <= self.maximum < 2.0**127:
            raise _refused(
                "initial",
                self.initial,
                f"minimum <= initial <= maximum < 2^127 (minimum={self.minimum}, maximum={self.maximum})",
                "Move the bound or the initial scale.",
            )

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest scale allowed."""
        return (self.initial, self.initial) if self.mode == "static" else (self.minimum, self.maximum)


@dataclass(frozen=True)
class ShadowSettings:
    """A second, no-grad forward of the actor in the rollout's dtype, on the same weights.

    It splits the log-ratio: α = log π_shadow - log μ is what the policy did, β = log π_train - log π_shadow what the
    precision did. It needs the actor's weights a second time, sharded alike, in that dtype.

    Attributes:
        dtype: of the shadow forward; the rollout's, which the presets put here.
        ratio_source: `training`: log-probs as the training forward gives them. `shadow`: the value of every log-prob
            of the actor is the shadow's, while its gradient goes through the training forward (straight-through), so
            that any loss sees the ratio exp(α) without β.
        every_n_steps: measure α and β in the first update of every n-th training step; 0 is never.
    """

    dtype: str | None = None
    ratio_source: str = "training"
    every_n_steps: int = 0

    def __post_init__(self) -> None:
        """Check every setting.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        if self.ratio_source not in RATIO_SOURCES:
            raise _refused(
                "ratio_source",
                self.ratio_source,
                " or ".join(RATIO_SOURCES),
                "Keep training, unless β is to leave the ratio.",
                "shadow",
            )
        if isinstance(self.every_n_steps, bool) or not isinstance(self.every_n_steps, int) or self.every_n_steps < 0:
            raise _refused(
                "every_n_steps",
                self.every_n_steps,
                "an integer >= 0, in training steps",
                "0 measures never, 10 costs little.",
                "shadow",
            )
        if self.enabled and self.dtype not in DTYPES and self.dtype not in LONG_NAMES:
            raise _refused(
                "dtype",
                self.dtype,
                f"{', '.join(DTYPES)} or {', '.join(LONG_NAMES)}",
                "Leave it out: the presets take it from actor_rollout_ref.rollout.dtype.",
                "shadow",
            )

    @property
    def enabled(self) -> bool:
        """Whether a shadow model has to be built."""
        return self.ratio_source == "shadow" or self.every_n_steps > 0


def _refused(name: str, value: object, allowed: str, remedy: str, block: str = "loss_scale") -> ConfigurationError:
    return ConfigurationError(setting=f"fsdp_config.{block}.{name}", value=value, allowed=allowed, remedy=remedy)
