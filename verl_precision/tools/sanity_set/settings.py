"""What `verl-precision sanity-set` draws, and which problems it keeps."""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from verl_precision.base.dtypes import Dtype
from verl_precision.base.settings import command_option, option, settings
from verl_precision.tools.jobs.settings import JudgedJob
from verl_precision.tools.sanity_set.schedule import Window


def _share(value: Fraction | str) -> Fraction:
    text = str(value)
    try:
        return Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise PydanticCustomError("share", "a share such as 0.2, 20% or 1/5") from None


Share = Annotated[Fraction, BeforeValidator(_share)]


@settings(command_option, kw_only=True)
class SanitySet(JudgedJob):
    """A data set, and the window of accuracies in which its problems are kept."""

    verb: ClassVar[str] = "sanity-set"
    data: Path = option(argument=True, help="Data set in verl's format: a .parquet or .jsonl file.", recorded=False)
    model: str = option("--model", "-m", help="Folder or hub name of the model that will be trained.")
    responses_per_problem: int = option(
        "--responses-per-problem", "-n", default=Window.responses, help="Number of responses.", ge=1
    )
    low: Share = option(default=Window.low, help="Lowest accuracy kept.")
    high: Share = option(default=Window.high, help="Highest accuracy kept.")
    dtype: Dtype = option(default="fp16", help="Dtype of the engine.")
    max_prompt_length: int = option(default=1024, help="Largest number of tokens; longer prompts are left out.", ge=1)
    max_response_length: int = option(default=6976, help="Largest number of tokens; longer responses are cut.", ge=1)
    in_flight: int = option(default=512, help="Responses that each engine draws at a time.", ge=1, recorded=False)
    all_responses: bool = option(default=False, help="Also draw for decided problems.", recorded=False)

    def __post_init__(self) -> None:
        """Refuse a window that cannot keep anything."""
        self.window  # noqa: B018 - it refuses

    @property
    def window(self) -> Window:
        """The accuracies that are kept."""
        return Window(self.responses_per_problem, self.low, self.high)
