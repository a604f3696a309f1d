"""What `verl-precision evaluate` evaluates."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from verl_precision.base.dtypes import Dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, option, require_each_once, settings
from verl_precision.tools.jobs.settings import JudgedJob


@settings(command_option, kw_only=True)
class Evaluation(JudgedJob):
    """A model on data sets, in each dtype and each context."""

    verb: ClassVar[str] = "evaluate"
    model: str = option(argument=True, help="Folder or hub name of the model, e.g. an exported checkpoint.")
    data: tuple[Path, ...] = option(
        help="Data set in verl's format: .parquet or .jsonl. Repeat the option for several.", recorded=False
    )
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = option(
        "--context", help="Most tokens of prompt and response together. Repeat the option for several."
    )
    dtypes: tuple[Dtype, ...] = option(
        "--dtype", default=("fp16",), help="Dtype of vLLM. Repeat the option for several."
    )
    responses: int = option("--responses", "-n", default=32, help="Responses to each problem: k of avg@k.", ge=1)
    temperature: float = option(default=0.6, help="Sampling temperature; 0 takes the most probable token.", ge=0)
    top_p: float = option(
        default=0.95, help="Share of the probability that is drawn from, most probable first.", gt=0, le=1
    )

    def __post_init__(self) -> None:
        """Refuse what is given twice, and several responses that would be the same one."""
        stems = tuple(path.stem for path in self.data)
        require_each_once("--data", stems, "each once; data sets are called by the name of their file")
        require_each_once("--context", self.contexts)
        require_each_once("--dtype", self.dtypes)
        if self.temperature == 0 and self.responses > 1:
            raise ConfigurationError(
                "at temperature 0 all responses to a problem are the same",
                setting="--responses",
                value=self.responses,
                allowed="1",
                remedy="Give --responses 1, or a --temperature above 0.",
            )

    @property
    def longest_context(self) -> int:
        """The context that responses are drawn in."""
        return max(self.contexts)
