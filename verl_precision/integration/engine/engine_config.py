"""verl's FSDP and Megatron configs with our typed settings. An engine with such a config is ours, any other is verl's.

The precision presets name these classes in `_target_`, so that verl builds them in place of its own.
"""

from dataclasses import dataclass, field

from verl.workers.config import FSDPEngineConfig, McoreEngineConfig

from verl_precision.base.dtypes import short
from verl_precision.engine.settings import LossScaleSettings, ShadowSettings, require_engine_settings


@dataclass
class PrecisionFSDPConfig(FSDPEngineConfig):
    """verl's settings and ours. The settings that decide a dtype are required and must agree.

    Attributes:
        mixed_precision: Compute (`param_dtype`), gradient reduction (`reduce_dtype`) and buffer (`buffer_dtype`) dtype;
            each bf16, fp16 or fp32; all required.
        model_dtype: Dtype of master weights, and with them of the optimizer's state; fp32.
        dtype: verl's documented setting, which its FSDP engine never reads; must agree with `param_dtype`.
        loss_scale: Used when the compute dtype is fp16.
        fp32_log_probs: Divide by the temperature, and take log-probs and entropy, in FP32.
        log_prob_chunk_tokens: Number of tokens whose FP32 logits exist at the same time.
        fp32_output_head: Compute the logits themselves in FP32 (weights as gathered, in `param_dtype`). vLLM's head
            stays in the rollout's dtype, and the logits of a micro-batch take twice the memory.
        shadow: The actor's second forward in the rollout's dtype; without effect in reference and critic.
        send_weight_manifest: Close every weight stream to the rollout with the digests that
            `weight_sync_worker.VerifiedWeightSyncExtension` compares; another receiver would load them as a weight.
        stochastic_rounding_to: bf16 or fp16: weights are rounded to it at random before they are sent to the rollout.
            None: the weights are sent in FP32, and the rollout rounds them to the nearest value.
        watch_routing: Compare the experts that the trainer would choose with those that the rollout has chosen. verl's
            own `router_replay.mode` replays the rollout's choice, and compares too.
        learning_rate_ess_base: Effective sample size, as a fraction, from which on an update of the actor has its full
            learning rate; below it the rate is scaled by the root of the share (`learning_rate.py`). None: always full.
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
        """Check that the dtypes are set, known and consistent."""
        super().__post_init__()
        require_engine_settings(self)

    @property
    def compute_dtype(self) -> str:
        """The dtype that parameters have in the forward: bf16, fp16 or fp32."""
        assert self.mixed_precision is not None
        return short(self.mixed_precision["param_dtype"])


@dataclass
class PrecisionMcoreConfig(McoreEngineConfig):
    """verl's Megatron settings, whose `dtype` is the compute dtype, and ours, as in `PrecisionFSDPConfig`.

    The loss scale is Megatron's own; its settings are in `optim.override_optimizer_config`.
    """

    send_weight_manifest: bool = False
