"""The options of each job that samples or scores: a class for a verb, whose fields are the command's options.

The classes are `MismatchJob` and `Explanation`, `Evaluation` and `SanitySet`; their bases have the options they share.
"""

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from verl_precision.base.dtypes import EXACT, Arithmetic, Dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, option, require_each_once, settings

BUILT_IN_PROMPTS = "built-in"
FLASH = "flash_attention_2"  # computes in 16 bits only
Verdict = Literal["open", "kept", "dropped"]  # on a problem


@settings(command_option, kw_only=True)
class JobSettings:
    """Options of every job that draws or scores responses. A folder belongs to one set of recorded options."""

    verb: ClassVar[str]
    model: str = option("--model", "-m", help="Folder or hub name of the model.")
    seed: int = option(default=0, help="Sampling seed. Each response derives its own seed from it.", ge=0)
    in_flight: int = option(
        default=256, help="Number of responses that an engine draws or scores at a time.", ge=1, recorded=False
    )
    output: Path | None = option(
        "--output", "-o", default=None, recorded=False,
        help="Folder of the results. An earlier job in this folder is resumed. Default: outputs/<verb>/<model>.",
    )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        return self.output or Path("outputs") / self.verb / re.sub(r"[^\w.-]+", "-", Path(self.model).name)


@settings(command_option, kw_only=True)
class PromptedJob(JobSettings):
    """Options of a job that compares log-probs of responses to prompts."""

    model: str = option("--model", "-m", default="tiny:qwen3", help="Folder or hub name; tiny:qwen3 is built in.")
    prompts: str = option(default=BUILT_IN_PROMPTS, help="A .parquet or .jsonl file. Default: 16 built-in questions.")
    prompt_field: str = option(
        default="prompt", help="Column of the prompts: chats in verl's format, or text.", recorded=False
    )
    max_prompts: int | None = option(default=None, help="Use only the first N prompts.", ge=1, recorded=False)
    responses: int = option("--responses", "-n", default=1, help="Responses to each prompt.", ge=1)
    max_response_tokens: int = option(default=64, help="A response ends after this many tokens.", ge=1)
    micro_batch_tokens: int = option(
        default=16384, help="Number of tokens in one forward pass of the trainer, with padding.", ge=1
    )
    arithmetic: Arithmetic = option(
        default="native", help="Operations of both engines: native uses their own kernels; the others need a CPU."
    )


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
    fail_above: tuple[str, ...] = option(
        default=(),
        help="Exit code 1 if a k3 is above this: 1e-3, or fp16/fp16=1e-5 for one pair. Repeatable.",
        recorded=False,
    )
    against: Path | None = option(
        default=None, help="summary.json of an earlier job, e.g. of another verl: show what has moved.", recorded=False
    )

    def __post_init__(self) -> None:
        """Refuse a dtype given twice, and flash attention in FP32."""
        require_each_once("--rollout-dtype", self.rollout_dtypes)
        require_each_once("--train-dtype", self.train_dtypes)
        if self.attention == FLASH and "fp32" in self.train_dtypes:
            problem = f"--attention {FLASH} with --train-dtype fp32: flash-attn computes in 16 bits only"
            raise ConfigurationError(problem, allowed="bf16, fp16", remedy="Use --attention sdpa, or leave fp32 out.")
        self.bars()

    def bars(self) -> dict[tuple[str, str], float]:
        """Return the highest k3 of each pair that has a bar; a bar for one pair replaces the one for all."""
        bars: dict[tuple[str, str], float] = {}
        for given in sorted(self.fail_above, key=lambda text: "=" in text):
            name, _, number = given.rpartition("=")
            named = [pair for pair in self.pairs if name in ("", "/".join(pair))]
            try:
                bar = float(number)
            except ValueError:
                bar = math.nan
            if not named or not 0 <= bar < math.inf:
                allowed = f"a number of nats, or {' or '.join('/'.join(pair) for pair in self.pairs)} with =NUMBER"
                problem = "this is no bar for a k3 of this job"
                raise ConfigurationError(problem, setting="--fail-above", value=given, allowed=allowed)
            bars |= dict.fromkeys(named, bar)
        return bars

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


@settings(command_option, kw_only=True)
class JudgedJob(JobSettings):
    """A job whose responses to problems are judged."""

    reward: str = option(default="verl", help="verl, math-verify, or FILE.py:FUNCTION with verl's signature.")
    pass_score: float = option(default=1.0, help="Lowest score of a correct response.")
    keep_text: bool = option(default=False, help="Write the responses' text into the journal.", recorded=False)


@settings(command_option, kw_only=True)
class Evaluation(JudgedJob):
    """A model on data sets, in each dtype and each context."""

    verb: ClassVar[str] = "evaluate"
    data: tuple[Path, ...] = option(
        help="Data set in verl's format: .parquet or .jsonl. Repeat the option for several.", recorded=False
    )
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = option(
        "--context", help="Limit on the tokens of prompt and response together. Repeat the option for several."
    )
    dtypes: tuple[Dtype, ...] = option("--dtype", default=("fp16",), help="Dtype of vLLM. Repeatable.")
    responses: int = option("--responses", "-n", default=32, help="Responses to each problem: k of avg@k.", ge=1)
    temperature: float = option(default=0.6, help="Sampling temperature; 0 takes the most probable token.", ge=0)
    top_p: float = option(
        default=0.95, help="Nucleus sampling: draw from the most probable tokens up to this share.", gt=0, le=1
    )

    def __post_init__(self) -> None:
        """Refuse a data set, a context or a dtype that is given twice."""
        stems = tuple(path.stem for path in self.data)
        require_each_once("--data", stems, "each once; a data set is named after its file")
        require_each_once("--context", self.contexts)
        require_each_once("--dtype", self.dtypes)

    @property
    def longest_context(self) -> int:
        """The longest context; responses are drawn in it."""
        return max(self.contexts)


@settings(command_option, kw_only=True)
class SanitySet(JudgedJob):
    """A data set, and the window of accuracies in which its problems are kept, both ends included.

    With k of m responses correct and n in all, the final number of correct responses lies in [k, k + n - m]. A problem
    is kept if that number is in [⌈low n⌉, ⌊high n⌋]. The verdict is decided as soon as the whole first interval lies
    inside the second (kept), or outside (dropped). All are whole numbers, so that 20% of 40 is 8 and not
    8.000000000000002.
    """

    verb: ClassVar[str] = "sanity-set"
    data: Path = option(argument=True, help="Data set in verl's format: a .parquet or .jsonl file.", recorded=False)
    responses: int = option("--responses", "-n", default=40, help="Responses to each problem.", ge=1)
    low: Fraction = option(default=Fraction(1, 5), help="Keep problems with at least this accuracy, e.g. 0.2 or 1/5.")
    high: Fraction = option(default=Fraction(4, 5), help="Keep problems with at most this accuracy.")
    dtype: Dtype = option(default="fp16", help="Dtype of the engine.")
    max_prompt_tokens: int = option(default=1024, help="Problems with a longer prompt are left out.", ge=1)
    max_response_tokens: int = option(default=6976, help="A response ends after this many tokens.", ge=1)
    in_flight: int = option(default=512, help="Responses that the engine draws at a time.", ge=1, recorded=False)

    def __post_init__(self) -> None:
        """Refuse a window that cannot keep anything."""
        if not 0 <= self.low <= self.high <= 1:
            raise ConfigurationError(self.window, allowed="0 <= low <= high <= 1", remedy="The paper keeps 0.2 to 0.8.")
        if self.fewest > self.most:
            problem = f"{self.window}: no accuracy of {self.responses} responses lies in this window"
            raise ConfigurationError(problem, remedy="Widen the window or draw more responses.")

    @property
    def window(self) -> str:
        """The window as options of the command line."""
        return f"--low {float(self.low):g} --high {float(self.high):g}"

    @property
    def fewest(self) -> int:
        """Smallest final number of correct responses that is kept."""
        return math.ceil(self.low * self.responses)

    @property
    def most(self) -> int:
        """Largest final number of correct responses that is kept."""
        return math.floor(self.high * self.responses)

    def verdict(self, correct: int, drawn: int) -> Verdict:
        """Return the verdict after m = `drawn` responses, of which k = `correct` are correct."""
        left = self.responses - drawn
        if correct > self.most or correct + left < self.fewest:
            return "dropped"
        return "kept" if correct >= self.fewest and correct + left <= self.most else "open"
