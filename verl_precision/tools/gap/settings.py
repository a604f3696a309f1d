"""The settings of `verl-precision mismatch` and of `verl-precision explain`."""

from typing import ClassVar, Literal

from verl_precision.base.dtypes import EXACT, Dtype
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
    # vLLM chooses its own kernel. With flash_attention_2 the trainer packs without padding; gpt-oss uses eager.
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
        """All pairs (rollout dtype, train dtype)."""
        return [(rollout, train) for rollout in self.rollout_dtypes for train in self.train_dtypes]


@settings(command_option, kw_only=True)
class Explanation(PromptedJob):
    """A rollout and a trainer; by default both have the same model."""

    verb: ClassVar[str] = "explain"
    rollout_model: str | None = option(
        default=None, help="Model of the rollout, if its weights differ from the trainer's, e.g. an older export."
    )
    rollout_dtype: Dtype = option(default="bf16", help="Dtype of vLLM.")
    train_dtype: Dtype = option(default="bf16", help="Dtype of the trainer.")
    temperature: float = option(default=1.0, help="Temperature of rollout and trainer.", gt=0)
    top_p: float = option(default=1.0, help="Nucleus sampling of the rollout: this share.", gt=0, le=1)
    top_k: int = option(default=0, help="The rollout draws from the N most probable tokens; 0 for all.", ge=0)
    # Raw means before temperature, top-p and top-k.
    raw_log_probs: bool = option(default=False, help="The rollout's log-probs are raw (logprobs_mode=raw_logprobs).")
    prefix_caching: bool = option(default=False, help="The rollout has a prefix cache and cuts prompts into chunks.")
    cuda_graphs: bool = option(default=False, help="The rollout compiles and uses CUDA graphs; on GPUs only.")
    attention: str = option(default="sdpa", help="Attention of the trainer, by its name in transformers.")
    packed: bool = option(default=False, help="The trainer packs sequences (use_remove_padding).")
    fp32_log_probs: bool = option(
        "--fp32-log-probs/--16-bit-log-probs", default=True, help="Precision of the trainer's log-softmax."
    )
    fp32_output_head: bool = option(default=False, help="The trainer computes its logits in FP32.")

    def __post_init__(self) -> None:
        """Refuse settings that exclude each other."""
        exact, fp32 = self.arithmetic == EXACT, self.train_dtype == "fp32"
        in_exact = "exact arithmetic needs the same operations in both engines"
        other_head = exact and (self.fp32_output_head or not self.fp32_log_probs)
        refused = {
            f"--arithmetic exact with two dtypes: {in_exact}": exact and self.train_dtype != self.rollout_dtype,
            f"--arithmetic exact with --fp32-output-head or --16-bit-log-probs: {in_exact}": other_head,
            f"--train-dtype fp32 with {FLASH}: flash-attn computes in 16 bits only": fp32 and self.attention == FLASH,
            "--train-dtype fp32 with --16-bit-log-probs: it has no 16-bit logits": fp32 and not self.fp32_log_probs,
        }
        for problem, holds in refused.items():
            if holds:
                raise ConfigurationError(problem, allowed="one of them", remedy="Leave one out.")
