"""Settings of this package's FSDP engine, of its loss scale and of its shadow forward, with bounds."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field

from verl_precision.errors import ConfigurationError
from verl_precision.settings import settings

# What verl's PrecisionType understands, as verl's YAML spells it in `mixed_precision` and in `dtype`.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LONG_NAMES = {long: short for short, long in DTYPES.items()}


@settings("fsdp_config.loss_scale.{}".format)
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
        """Check that the initial scale lies between its bounds.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(
                setting="fsdp_config.loss_scale.initial",
                value=self.initial,
                allowed=f"minimum <= initial <= maximum (minimum={self.minimum}, maximum={self.maximum})",
                remedy="Move the bound or the initial scale.",
            )

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest scale allowed."""
        return (self.initial, self.initial) if self.mode == "static" else (self.minimum, self.maximum)


@settings("fsdp_config.shadow.{}".format)
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
    ratio_source: Literal["training", "shadow"] = "training"
    every_n_steps: int = Field(default=0, ge=0, strict=True, description="0 measures never, 10 costs little.")

    def __post_init__(self) -> None:
        """Check the dtype of a shadow that is switched on.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        if self.enabled and self.dtype not in DTYPES and self.dtype not in LONG_NAMES:
            raise ConfigurationError(
                setting="fsdp_config.shadow.dtype",
                value=self.dtype,
                allowed=f"{', '.join(DTYPES)} or {', '.join(LONG_NAMES)}",
                remedy="Leave it out: the presets take it from actor_rollout_ref.rollout.dtype.",
            )

    @property
    def enabled(self) -> bool:
        """Whether a shadow model has to be built."""
        return self.ratio_source == "shadow" or self.every_n_steps > 0


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
    return kind(**{key: value for key, value in block.items() if key != "_target_"})
