"""What `verl-precision mismatch` measures."""

from typing import ClassVar, Literal

from verl_precision.base.dtypes import Dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, option, require_each_once, settings
from verl_precision.tools.jobs.settings import FLASH, PromptedJob


@settings(command_option, kw_only=True)
class MismatchJob(PromptedJob):
    """Every rollout dtype with every train dtype, on the same responses."""

    verb: ClassVar[str] = "mismatch"
    rollout_dtypes: tuple[Dtype, ...] = option(
        "--rollout-dtype", default=("fp16", "bf16"), help="Dtype of vLLM. Repeat the option for several."
    )
    train_dtypes: tuple[Dtype, ...] = option(
        "--train-dtype", default=("fp16", "bf16"), help="Dtype of the trainer. Repeat the option for several."
    )
    responses: int = option("--responses", "-n", default=8, help="Responses to each prompt and rollout dtype.", ge=1)
    max_response_tokens: int = option(default=1024, help="A response ends after this many tokens.", ge=1)
    # vLLM chooses its own. With flash_attention_2 the trainer packs without padding; gpt-oss has eager.
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option(default="sdpa", help="Attention of the trainer.")

    def __post_init__(self) -> None:
        """Refuse a dtype given twice, and flash attention in FP32."""
        require_each_once("--rollout-dtype", self.rollout_dtypes)
        require_each_once("--train-dtype", self.train_dtypes)
        if self.attention == FLASH and "fp32" in self.train_dtypes:
            problem = f"--attention {FLASH} with --train-dtype fp32: flash-attn computes in 16 bits only"
            raise ConfigurationError(problem, allowed="bf16, fp16", remedy="Use --attention sdpa, or leave fp32 out.")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All (rollout dtype, train dtype)."""
        return [(rollout, train) for rollout in self.rollout_dtypes for train in self.train_dtypes]
