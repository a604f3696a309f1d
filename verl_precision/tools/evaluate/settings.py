"""What `verl-precision evaluate` evaluates, and which problems `verl-precision sanity-set` keeps."""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from verl_precision.base.dtypes import Dtype
from verl_precision.base.settings import command_option, option, require_each_once, settings
from verl_precision.tools.evaluate.schedule import Window
from verl_precision.tools.jobs.settings import JobSettings


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
    dtypes: tuple[Dtype, ...] = option(
        "--dtype", default=("fp16",), help="Dtype of vLLM. Repeat the option for several."
    )
    responses: int = option("--responses", "-n", default=32, help="Responses to each problem: k of avg@k.", ge=1)
    temperature: float = option(default=0.6, help="Sampling temperature; 0 takes the most probable token.", ge=0)
    top_p: float = option(
        default=0.95, help="Nucleus sampling: draw from the most probable tokens up to this share.", gt=0, le=1
    )

    def __post_init__(self) -> None:
        """Refuse what is given twice."""
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
    """A data set, and the window of accuracies in which its problems are kept."""

    verb: ClassVar[str] = "sanity-set"
    data: Path = option(argument=True, help="Data set in verl's format: a .parquet or .jsonl file.", recorded=False)
    responses: int = option("--responses", "-n", default=Window.responses, help="Responses to each problem.", ge=1)
    low: Fraction = option(default=Window.low, help="Keep problems with at least this accuracy, e.g. 0.2 or 1/5.")
    high: Fraction = option(default=Window.high, help="Keep problems with at most this accuracy.")
    dtype: Dtype = option(default="fp16", help="Dtype of the engine.")
    max_prompt_tokens: int = option(default=1024, help="Problems with a longer prompt are left out.", ge=1)
    max_response_tokens: int = option(default=6976, help="A response ends after this many tokens.", ge=1)
    in_flight: int = option(default=512, help="Responses that the engine draws at a time.", ge=1, recorded=False)

    def __post_init__(self) -> None:
        """Refuse a window that cannot keep anything."""
        self.window  # noqa: B018 - it refuses

    @property
    def window(self) -> Window:
        """The accuracies that are kept."""
        return Window(self.responses, self.low, self.high)
