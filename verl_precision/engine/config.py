"""verl's FSDP engine config with our typed settings; an engine that gets one is ours, any other is verl's.

Reached through `_target_` in the precision presets, so that verl builds it wherever it builds its own.
"""

from dataclasses import dataclass, field

from verl.workers.config import FSDPEngineConfig

from verl_precision.engine.settings import DTYPES, LONG_NAMES, LossScaleSettings, ShadowSettings
from verl_precision.errors import ConfigurationError


@dataclass
class PrecisionFSDPConfig(FSDPEngineConfig):
    """verl's settings, of which those that decide a dtype must be said and agree, and ours.

    Attributes:
        mixed_precision: compute (`param_dtype`), gradient reduction (`reduce_dtype`) and buffer (`buffer_dtype`) dtype;
            each bf16, fp16 or fp32; all required.
        model_dtype: dtype of master weights, and with them of the optimizer's state; fp32.
        dtype: verl's documented switch, which its FSDP engine never reads; must say what `param_dtype` says.
        loss_scale: used when the compute dtype is fp16.
        fp32_log_probs: divide by the temperature, and take log-probs and entropy, in FP32.
        log_prob_chunk_tokens: tokens of which FP32 logits exist at a time.
        fp32_output_head: compute the logits themselves in FP32 (weights as gathered, in `param_dtype`). vLLM's head
            stays in the rollout's dtype, and the logits of a micro-batch take twice the memory.
        shadow: the actor's second forward in the rollout's dtype; without effect in reference and critic.
        send_weight_manifest: close every weight stream to the rollout with the digests that
            `weight_sync.worker.VerifiedWeightSyncExtension` compares; any other receiver would take it for a weight.
    """

    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)
    fp32_log_probs: bool = True
    log_prob_chunk_tokens: int = 512
    fp32_output_head: bool = False
    shadow: ShadowSettings = field(default_factory=ShadowSettings)
    send_weight_manifest: bool = False

    def __post_init__(self) -> None:
        """Check that the dtypes are said, known and without contradiction.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        super().__post_init__()
        wanted = ("param_dtype", "reduce_dtype", "buffer_dtype")
        found = self.mixed_precision
        if found is None or set(found) != set(wanted):
            raise ConfigurationError(
                "what is not said would silently be verl's default, bf16 for param_dtype",
                setting="fsdp_config.mixed_precision",
                value=found,
                allowed=f"all of {', '.join(wanted)}",
                remedy="Choose a preset: precision=fp16.",
            )
        for name in wanted:
            if found[name] not in DTYPES and found[name] not in LONG_NAMES:
                raise ConfigurationError(
                    setting=f"fsdp_config.mixed_precision.{name}",
                    value=found[name],
                    allowed=", ".join(DTYPES),
                    remedy="Choose a preset: precision=fp16.",
                )
        if DTYPES.get(self.dtype, self.dtype) != DTYPES[self.compute_dtype]:
            raise ConfigurationError(
                f"it contradicts mixed_precision.param_dtype={found['param_dtype']!r}, which is what verl's FSDP "
                "engine reads; it ignores dtype",
                setting="fsdp_config.dtype",
                value=self.dtype,
                allowed="the same in both",
                remedy="Choose a preset (precision=fp16) instead of setting dtype.",
            )
        if self.model_dtype not in ("fp32", "float32"):
            raise ConfigurationError(
                "master weights and Adam's moments would be in 16 bits, where eps=1e-8 is zero and small updates "
                "round away, and RoPE's frequencies would be rounded",
                setting="fsdp_config.model_dtype",
                value=self.model_dtype,
                allowed="fp32",
                remedy="The compute dtype is mixed_precision.param_dtype; offload_policy=True saves memory.",
            )
        for name, wanted_type in (("loss_scale", LossScaleSettings), ("shadow", ShadowSettings)):
            if not isinstance(getattr(self, name), wanted_type):
                raise ConfigurationError(
                    setting=f"fsdp_config.{name}",
                    value=getattr(self, name),
                    allowed=f"a block with _target_: {wanted_type.__module__}.{wanted_type.__qualname__}",
                    remedy="Choose precision=fp16.",
                )
        chunk = self.log_prob_chunk_tokens
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ConfigurationError(
                setting="fsdp_config.log_prob_chunk_tokens",
                value=chunk,
                allowed="an integer >= 1, in tokens",
                remedy="Leave it out for the default; halve it when memory is short.",
            )

    @property
    def compute_dtype(self) -> str:
        """The dtype that parameters have in the forward: bf16, fp16 or fp32."""
        assert self.mixed_precision is not None
        name = self.mixed_precision["param_dtype"]
        return LONG_NAMES.get(name, name)
