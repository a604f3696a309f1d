"""verl's FSDP and Megatron configs with our typed settings; an engine that gets one is ours, any other is verl's.

Reached through `_target_` in the precision presets, so that verl builds it wherever it builds its own.
"""

from dataclasses import dataclass, field

from verl.workers.config import FSDPEngineConfig, McoreEngineConfig

from verl_precision.base.dtypes import short
from verl_precision.engine.settings import LossScaleSettings, ShadowSettings, require_engine_settings


@dataclass
class PrecisionFSDPConfig(FSDPEngineConfig):
    """verl's settings, of which those that decide a dtype must be said and agree, and ours.

    Attributes:
        mixed_precision: Compute (`param_dtype`), gradient reduction (`reduce_dtype`) and buffer (`buffer_dtype`) dtype;
            each bf16, fp16 or fp32; all required.
        model_dtype: Dtype of master weights, and with them of the optimizer's state; fp32.
        dtype: verl's documented switch, which its FSDP engine never reads; must say what `param_dtype` says.
        loss_scale: Used when the compute dtype is fp16.
        fp32_log_probs: Divide by the temperature, and take log-probs and entropy, in FP32.
        log_prob_chunk_tokens: Tokens of which FP32 logits exist at a time.
        fp32_output_head: Compute the logits themselves in FP32 (weights as gathered, in `param_dtype`). vLLM's head
            stays in the rollout's dtype, and the logits of a micro-batch take twice the memory.
        shadow: The actor's second forward in the rollout's dtype; without effect in reference and critic.
        send_weight_manifest: Close every weight stream to the rollout with the digests that
            `weight_sync_worker.VerifiedWeightSyncExtension` compares; any other receiver would take it for a weight.
        stochastic_rounding_to: bf16 or fp16, to which weights are rounded at random before they leave for the rollout;
            None: they leave in FP32, and the rollout rounds to the nearest.
        watch_routing: Compare the experts that the trainer would choose with those that the rollout has chosen. verl's
            own `router_replay.mode`, which replays them, compares too.
        learning_rate_ess_base: Effective sample size, as a fraction, at and above which an update of the actor has its
            whole learning rate; below, the rate is scaled by the root of the share (`learning_rate.py`). None: always.
    """

    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)
    fp32_log_probs: bool = True
    log_prob_chunk_tokens: int = 512
    fp32_output_head: bool = False
    shadow: ShadowSettings = field(default_factory=ShadowSettings)
    send_weight_manifest: bool = False
    stochastic_rounding_to: str | None = None
    watch_routing: bool = False
    learning_rate_ess_base: float | None = None

    def __post_init__(self) -> None:
        """Check that the dtypes are said, known and without contradiction."""
        super().__post_init__()
        require_engine_settings(self)

    @property
    def compute_dtype(self) -> str:
        """The dtype that parameters have in the forward: bf16, fp16 or fp32."""
        assert self.mixed_precision is not None
        return short(self.mixed_precision["param_dtype"])


@dataclass
class PrecisionMcoreConfig(McoreEngineConfig):
    """verl's settings of Megatron, of which `dtype` decides what it computes in, and ours, as in `PrecisionFSDPConfig`.

    The loss scale is Megatron's own, with its settings: `optim.override_optimizer_config`.
    """

    send_weight_manifest: bool = False
