"""What `verl-precision explain` explains: a rollout, a trainer, and the tokens on which they are compared."""

from typing import ClassVar

from verl_precision.base.dtypes import EXACT, Dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, option, settings
from verl_precision.tools.jobs.settings import BUILT_IN_PROMPTS, PromptedJob


@settings(command_option, kw_only=True)
class Explanation(PromptedJob):
    """A rollout and a trainer; by default both have the same model."""

    verb: ClassVar[str] = "explain"
    rollout_model: str | None = option(
        default=None, help="Model of the rollout, if it has other weights, e.g. an older export."
    )
    adapter: str | None = option(
        default=None, help="Folder of a LoRA adapter that the trainer has; the rollout has it merged."
    )
    rollout_dtype: Dtype = option(default="bf16", help="Dtype of vLLM.")
    train_dtype: Dtype = option(default="bf16", help="Dtype of the trainer.")
    temperature: float = option(default=1.0, help="Temperature of both.", gt=0)
    top_p: float = option(default=1.0, help="Share of the probability that the rollout draws from.", gt=0, le=1)
    top_k: int = option(default=0, help="Most probable tokens that the rollout draws from; 0 for all.", ge=0)
    # Before temperature, top-p and top-k.
    raw_log_probs: bool = option(default=False, help="The rollout's log-probs are raw (logprobs_mode=raw_logprobs).")
    prefix_caching: bool = option(default=False, help="The rollout has a prefix cache and cuts prompts into chunks.")
    cuda_graphs: bool = option(default=False, help="The rollout compiles, and runs CUDA graphs; on GPUs only.")
    attention: str = option(default="sdpa", help="Attention of the trainer, by its name in transformers.")
    packed: bool = option(default=False, help="The trainer packs (use_remove_padding); else it pads.")
    fp32_log_probs: bool = option(
        "--fp32-log-probs/--16-bit-log-probs", default=True, help="How the trainer takes log-probs."
    )
    fp32_output_head: bool = option(default=False, help="The trainer computes its logits in FP32.")
    tokens: str | None = option(default=None, help="Folder of a run's kept tokens: score these, and draw none.")
    step: int | None = option(default=None, help="Of --tokens: this step's, and not the first one's.", ge=1)
    exact: bool = option(default=False, help="Compare the engines in exact arithmetic, on a CPU, and not in FP32.")

    @property
    def through_exact(self) -> bool:
        """Whether the path between the engines is in exact arithmetic, in the dtype of both."""
        return self.exact or self.arithmetic == EXACT

    def __post_init__(self) -> None:
        """Refuse what a trainer in FP32 does not have, and two answers to what the rollout has."""
        if self.adapter is not None and self.rollout_model is not None:
            problem = f"--adapter {self.adapter} with --rollout-model: the rollout has the trainer's weights, merged"
            raise ConfigurationError(problem, allowed="one of them", remedy="Leave one out.")
        if self.step is not None and self.tokens is None:
            raise ConfigurationError(f"--step {self.step} is one of --tokens", remedy="Name the file with --tokens.")
        if self.tokens is not None and (self.prompts != BUILT_IN_PROMPTS or self.responses != 1):
            problem = f"--tokens {self.tokens} with --prompts or --responses: the responses are there already"
            raise ConfigurationError(problem, allowed="one of them", remedy="Leave --prompts and --responses out.")
        if self.through_exact:
            head = self.fp32_log_probs and not self.fp32_output_head
            alike = {
                "--train-dtype as --rollout-dtype": self.train_dtype == self.rollout_dtype,
                "no --adapter: the rollout rounds the merged weight": self.adapter is None,
                "--fp32-log-probs and no --fp32-output-head": head or self.arithmetic != EXACT,
            }
            for allowed in (allowed for allowed, holds in alike.items() if not holds):
                problem = "in exact arithmetic the engines would not round the same numbers"
                raise ConfigurationError(problem, allowed=allowed, remedy="Change it, or explain it in FP32.")
        fp32 = self.train_dtype == "fp32"
        if fp32 and self.attention == "flash_attention_2":
            problem = "--attention flash_attention_2 with --train-dtype fp32: flash-attn computes in 16 bits only"
            raise ConfigurationError(problem, allowed="sdpa", remedy="Use --attention sdpa.")
        if fp32 and not self.fp32_log_probs:
            problem = "--16-bit-log-probs with --train-dtype fp32: a trainer in fp32 has no 16-bit logits"
            raise ConfigurationError(problem, allowed="--fp32-log-probs", remedy="Leave it out.")
