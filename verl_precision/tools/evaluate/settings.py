"""The settings of `verl-precision evaluate` and of `verl-precision sanity-set`."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from verl_precision.base.dtypes import Dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, option, require_each_once, settings
from verl_precision.tools.jobs.settings import JobSettings

Verdict = Literal["open", "kept", "dropped"]  # on a problem


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
