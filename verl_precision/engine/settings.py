"""Settings of this package's FSDP engine, of its loss scale and of its shadow forward, with bounds."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.base.files import table_of
from verl_precision.base.settings import settings

# The spellings in verl's YAML, in `mixed_precision` and in `dtype`.
DtypeName = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]

WORDS = table_of(__file__, "words.yaml")
_PRESET = "Choose a preset: precision=fp16."


@settings("fsdp_config.loss_scale.{}".format)
class LossScaleSettings:
    """Settings of the loss scale in FP16; without effect in BF16 and FP32.

    Attributes:
        mode: `dynamic` (scale grows and backs off) or `static` (stays at `initial`; overflowing steps are skipped).
        initial: S of the first step. 2^16 is the default of verl and torch.
        growth_factor: S ← S·growth_factor after `growth_interval` consecutive updates without overflow; > 1.
        growth_interval: Optimizer steps; 400 is verl's fixed value.
        backoff_factor: S ← S·backoff_factor after an overflow; in (0, 1).
        minimum: S never falls below it.
        maximum: S never rises above it. If all gradients are zero, an unbounded S would reach inf
            and stay there.
        stop_after_steps_at_minimum: Consecutive overflowing steps with S at its minimum after which the run stops.
    """

    mode: Literal["dynamic", "static"] = "dynamic"
    initial: float = Field(default=2.0**16, gt=0, strict=True, allow_inf_nan=False)
    growth_factor: float = Field(
        default=2.0, gt=1, strict=True, allow_inf_nan=False, description="Set mode=static for a scale that never grows."
    )
    growth_interval: int = Field(default=400, ge=1, strict=True)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1, strict=True)
    minimum: float = Field(default=1.0, gt=0, strict=True, allow_inf_nan=False)
    maximum: float = Field(default=2.0**32, gt=0, lt=2.0**127, strict=True)
    stop_after_steps_at_minimum: int = Field(default=10, ge=1, strict=True)

    def __post_init__(self) -> None:
        """Check that the initial scale lies between its bounds."""
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(value=self.initial, **filled(WORDS["initial scale"], scale=self))

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest scale allowed."""
        return (self.initial, self.initial) if self.mode == "static" else (self.minimum, self.maximum)


@settings("fsdp_config.shadow.{}".format)
class ShadowSettings:
    """A second, no-grad forward of the actor in the rollout's dtype, on the same weights.

    It splits the log-ratio: α = log π_shadow - log μ is the change of the policy, β = log π_train - log π_shadow the
    effect of the precision. It needs a second copy of the actor's weights in that dtype, sharded alike.

    Attributes:
        dtype: Dtype of the shadow forward; the presets set it to the rollout's.
        ratio_source: `training`: log-probs as the training forward gives them. `shadow`: the value of every log-prob
            of the actor is the shadow's, while its gradient goes through the training forward (straight-through), so
            that any loss sees the ratio exp(α) without β.
        every_n_steps: Measure α and β in the first update of every n-th training step; 0 is never.
    """

    dtype: str | None = None
    ratio_source: Literal["training", "shadow"] = "training"
    every_n_steps: int = Field(default=0, ge=0, strict=True, description="0 switches it off; 10 costs little.")

    def __post_init__(self) -> None:
        """Check the dtype of a shadow that is switched on."""
        known = get_args(DtypeName)
        if self.enabled and self.dtype not in known:
            raise ConfigurationError(value=self.dtype, **filled(WORDS["shadow's dtype"], dtypes=", ".join(known)))

    @property
    def enabled(self) -> bool:
        """Whether a shadow model has to be built."""
        return self.ratio_source == "shadow" or self.every_n_steps > 0


@settings("fsdp_config.mixed_precision.{}".format)
class MixedPrecision:
    """The dtypes that verl's FSDP engine reads, for the forward, the reduction of the gradients and the buffers."""

    param_dtype: DtypeName = Field(description=_PRESET)
    reduce_dtype: DtypeName = Field(description=_PRESET)
    buffer_dtype: DtypeName = Field(description=_PRESET)


@settings("fsdp_config.{}".format)
class _EngineSettings:
    """Bounds of single settings of `PrecisionFSDPConfig`."""

    # In 16 bits, Adam's eps=1e-8 is zero, small updates round away, and RoPE's frequencies are rounded.
    model_dtype: Literal["fp32", "float32"] = Field(
        default="fp32",
        description="Master weights and Adam's moments need FP32. The compute dtype is mixed_precision.param_dtype; "
        "offload_policy=True saves memory.",
    )
    stochastic_rounding_to: Literal["bf16", "fp16", None] = Field(
        default=None, description="Set weight_sync.rounding; the presets derive this from it and the rollout's dtype."
    )
    learning_rate_ess_base: float | None = Field(
        default=None, gt=0, le=1, strict=True, description="VCPO uses 1.0; without it the rate is not scaled."
    )
    log_prob_chunk_tokens: int = Field(default=512, ge=1, strict=True, description="Halve it when memory is short.")


def require_engine_settings(found: Mapping[str, Any]) -> ShadowSettings:
    """Require consistent dtypes, and settings within bounds; return the settings of the shadow.

    `found` is a `PrecisionFSDPConfig`, or the block of a config that becomes one.
    """
    mixed = found.get("mixed_precision")
    required = [field.name for field in dataclasses.fields(MixedPrecision)]
    if mixed is None or set(mixed) != set(required):
        raise ConfigurationError(value=mixed, **filled(WORDS["mixed precision"], required=", ".join(required)))
    compute, dtype = MixedPrecision(**mixed).param_dtype, found.get("dtype", "bfloat16")
    if short(dtype) != short(compute):
        raise ConfigurationError(value=dtype, **filled(WORDS["dtype"], compute=compute))
    own = [field.name for field in dataclasses.fields(_EngineSettings)]  # type: ignore[arg-type]
    _EngineSettings(**{key: found[key] for key in own if key in found})
    _typed(found, "loss_scale", LossScaleSettings)
    return _typed(found, "shadow", ShadowSettings)


def _typed(found: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Return a block of settings as an object of its type, built as Hydra will build it."""
    block = found.get(name, kind())
    if isinstance(block, kind):
        return block
    target = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(block, Mapping) or block.get("_target_") != target:
        allowed = f"a block with _target_: {target}"
        raise ConfigurationError(setting=f"fsdp_config.{name}", value=block, allowed=allowed, remedy=_PRESET)
    return kind(**{key: value for key, value in block.items() if key != "_target_"})
