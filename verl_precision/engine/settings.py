"""Settings of this package's FSDP engine, of its loss scale and of its shadow forward, with bounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

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


T = TypeVar("T", LossScaleSettings, ShadowSettings)
MIXED_PRECISION = ("param_dtype", "reduce_dtype", "buffer_dtype")


def require_engine_settings(found: Mapping[str, Any]) -> ShadowSettings:
    """Require that dtypes are said, known and without contradiction, and every setting of ours within its bounds.

    Args:
        found: A `PrecisionFSDPConfig`, or the block of a config that becomes one.

    Returns:
        The settings of its shadow.

    Raises:
        ConfigurationError: naming setting, value, what is allowed and what to do.
    """
    mixed = found.get("mixed_precision")
    if mixed is None or set(mixed) != set(MIXED_PRECISION):
        raise ConfigurationError(
            "what is not said would silently be verl's default, bf16 for param_dtype",
            setting="fsdp_config.mixed_precision",
            value=mixed,
            allowed=f"all of {', '.join(MIXED_PRECISION)}",
            remedy="Choose a preset: precision=fp16.",
        )
    for name in MIXED_PRECISION:
        if mixed[name] not in DTYPES and mixed[name] not in LONG_NAMES:
            raise ConfigurationError(
                setting=f"fsdp_config.mixed_precision.{name}",
                value=mixed[name],
                allowed=", ".join(DTYPES),
                remedy="Choose a preset: precision=fp16.",
            )
    dtype, compute = found.get("dtype", "bfloat16"), mixed["param_dtype"]
    if LONG_NAMES.get(dtype, dtype) != LONG_NAMES.get(compute, compute):
        raise ConfigurationError(
            f"it contradicts mixed_precision.param_dtype={compute!r}, which is what verl's FSDP engine reads; it "
            "ignores dtype",
            setting="fsdp_config.dtype",
            value=dtype,
            allowed="the same in both",
            remedy="Choose a preset (precision=fp16) instead of setting dtype.",
        )
    if found.get("model_dtype", "fp32") not in ("fp32", "float32"):
        raise ConfigurationError(
            "master weights and Adam's moments would be in 16 bits, where eps=1e-8 is zero and small updates round "
            "away, and RoPE's frequencies would be rounded",
            setting="fsdp_config.model_dtype",
            value=found.get("model_dtype"),
            allowed="fp32",
            remedy="The compute dtype is mixed_precision.param_dtype; offload_policy=True saves memory.",
        )
    _typed(found, "loss_scale", LossScaleSettings)
    chunk = found.get("log_prob_chunk_tokens", 1)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ConfigurationError(
            setting="fsdp_config.log_prob_chunk_tokens",
            value=chunk,
            allowed="an integer >= 1, in tokens",
            remedy="Leave it out for the default; halve it when memory is short.",
        )
    return _typed(found, "shadow", ShadowSettings)


def _typed(found: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a block of settings as its type: as it is, or built as Hydra will build it."""
    block = found.get(name, kind())
    if isinstance(block, kind):
        return block
    target = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(block, Mapping) or block.get("_target_") != target:
        allowed = f"a block with _target_: {target}"
        raise ConfigurationError(
            setting=f"fsdp_config.{name}", value=block, allowed=allowed, remedy="Choose precision=fp16."
        )
    values = {key: value for key, value in block.items() if key != "_target_"}
    known = [field.name for field in fields(kind)]
    for key in values.keys() - set(known):
        raise _refused(key, values[key], ", ".join(known), "There is no such setting: check its spelling.", name)
    return kind(**values)
