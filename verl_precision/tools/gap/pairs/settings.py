"""What a job measures; what cannot work is refused here, before a model loads."""

from typing import Literal

from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, settings
from verl_precision.tools.engines.engine import Dtype
from verl_precision.tools.engines.model import Model


@settings(command_option)
class MismatchJob:
    """Everything that a sample or a score depends on; a folder belongs to one of these.

    The command line explains each field (`verl-precision mismatch --help`).
    """

    model: str
    prompts: str  # name of the file that they came from; the journal has their tokens
    rollout_dtypes: tuple[Dtype, ...] = Field(default=("fp16", "bf16"), title="--rollout-dtype")  # vLLM samples
    train_dtypes: tuple[Dtype, ...] = Field(default=("fp16", "bf16"), title="--train-dtype")  # the trainer scores
    responses: int = Field(default=8, ge=1)
    max_response_tokens: int = Field(default=1024, ge=1)
    seed: int = Field(default=0, ge=0)  # the same in every dtype
    # Attention of the trainer; vLLM chooses its own. With flash_attention_2 the trainer packs without padding.
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    micro_batch_tokens: int = Field(default=16384, ge=1)  # padding included

    def __post_init__(self) -> None:
        """Refuse a dtype given twice, and flash attention in FP32."""
        for option, dtypes in (("--rollout-dtype", self.rollout_dtypes), ("--train-dtype", self.train_dtypes)):
            if not dtypes or len(set(dtypes)) != len(dtypes):
                problem, allowed = f"{option} {' '.join(dtypes)}: this cannot work", "at least one dtype, and each once"
                raise ConfigurationError(problem, allowed=allowed, remedy="Repeat the option for several.")
        if self.attention == "flash_attention_2" and "fp32" in self.train_dtypes:
            problem = "--attention flash_attention_2 with --train-dtype fp32: flash-attn computes in 16 bits only"
            raise ConfigurationError(problem, allowed="bf16, fp16", remedy="Use --attention sdpa, or leave fp32 out.")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All (rollout dtype, train dtype)."""
        return [(rollout, train) for rollout in self.rollout_dtypes for train in self.train_dtypes]


def check_model(job: MismatchJob, model: Model, longest_prompt: int) -> None:
    """Refuse a job that this model cannot do; the longest prompt is given in tokens.

    Raises:
        ConfigurationError: If vLLM refuses FP16 for it, or responses do not fit its context.
    """
    model.require_dtypes("--rollout-dtype", job.rollout_dtypes)
    needed = longest_prompt + job.max_response_tokens
    if model.context is not None and needed > model.context:
        raise ConfigurationError(
            f"with the longest prompt ({longest_prompt} tokens) a sequence has {needed} tokens, and the model's "
            f"context {model.context}",
            setting="--max-response-tokens",
            value=job.max_response_tokens,
            allowed=f"up to {max(model.context - longest_prompt, 0)}",
            remedy="Lower it, or leave long prompts out.",
        )
