"""What is explained: a rollout, a trainer, and the tokens on which they are compared."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, settings
from verl_precision.tools.engines.engine import Dtype
from verl_precision.tools.engines.model import Model


@settings(command_option)
class Explanation:
    """Everything that a sample or a score depends on; a folder belongs to one of these.

    The command line explains each field (`verl-precision explain --help`).
    """

    model: str  # what the trainer has
    prompts: str  # name of the file that they came from; the journal has their tokens
    rollout_model: str | None = None  # what the rollout has; None: the same
    adapter: str | None = None  # LoRA adapter of the trainer, which the rollout has merged
    rollout_dtype: Dtype = "bf16"
    train_dtype: Dtype = "bf16"
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    raw_log_probs: bool = False  # of the rollout: before temperature, top-p and top-k
    prefix_caching: bool = False  # and chunked prefill
    cuda_graphs: bool = False
    attention: str = "sdpa"
    packed: bool = False
    fp32_output_head: bool = False
    fp32_log_probs: bool = True
    micro_batch_tokens: int = Field(default=16384, ge=1)
    responses: int = Field(default=1, ge=1)
    max_response_tokens: int = Field(default=128, ge=1)
    seed: int = Field(default=0, ge=0)

    def __post_init__(self) -> None:
        """Refuse what a trainer in FP32 does not have, and two answers to what the rollout has."""
        if self.adapter is not None and self.rollout_model is not None:
            problem = f"--adapter {self.adapter} with --rollout-model: the rollout has the trainer's weights, merged"
            raise ConfigurationError(problem, allowed="one of them", remedy="Leave one out.")
        if self.train_dtype != "fp32":
            return
        if self.attention == "flash_attention_2":
            problem = "--attention flash_attention_2 with --train-dtype fp32: flash-attn computes in 16 bits only"
            raise ConfigurationError(problem, allowed="sdpa", remedy="Use --attention sdpa.")
        if not self.fp32_log_probs:
            problem = "--16-bit-log-probs with --train-dtype fp32: a trainer in fp32 has no 16-bit logits"
            raise ConfigurationError(problem, allowed="--fp32-log-probs", remedy="Leave it out.")

    @property
    def truncated(self) -> bool:
        """Whether the rollout's log-probs are of fewer tokens than the vocabulary has."""
        return not self.raw_log_probs and (self.top_p < 1 or self.top_k > 0)

    @property
    def untempered(self) -> bool:
        """Whether the rollout's log-probs are of another temperature than it draws at."""
        return self.raw_log_probs and self.temperature != 1


_FIELDS = {field.name for field in fields(Explanation)}


def explanation_of(values: Mapping[str, Any]) -> Explanation:
    """Return the explanation among values that have others beside its own."""
    return Explanation(**{name: value for name, value in values.items() if name in _FIELDS})


def check_model(job: Explanation, model: Model, longest_prompt: int) -> None:
    """Refuse a job that this model cannot do; the longest prompt is given in tokens.

    Raises:
        ConfigurationError: If vLLM refuses FP16 for it, or responses do not fit its context.
    """
    model.require_dtypes("--rollout-dtype", [job.rollout_dtype])
    needed = longest_prompt + job.max_response_tokens + 1  # vLLM scores a prompt only if it draws one token more
    if model.context is not None and needed > model.context:
        raise ConfigurationError(
            f"the longest prompt has {longest_prompt} tokens, and the model's context {model.context}",
            setting="--max-response-tokens",
            value=job.max_response_tokens,
            allowed=f"up to {max(model.context - longest_prompt - 1, 0)}",
            remedy="Lower it, or leave long prompts out.",
        )
