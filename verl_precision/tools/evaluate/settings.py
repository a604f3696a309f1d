"""What a job evaluates; what cannot work is refused here, before a model loads."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, settings
from verl_precision.tools.engines.engine import Dtype
from verl_precision.tools.engines.model import Model


@settings(command_option)
class Evaluation:
    """Everything that a response or its verdict depends on; a folder belongs to one of these.

    The command line explains each field (`verl-precision evaluate --help`).
    """

    model: str
    data: tuple[Path, ...]
    contexts: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(title="--context")]
    dtypes: tuple[Dtype, ...] = Field(default=("fp16",), title="--dtype")
    responses: int = Field(default=32, ge=1)
    temperature: float = Field(default=0.6, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    seed: int = 0  # the same in every dtype
    reward: str = "verl"
    pass_score: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is given twice, and several responses that would be the same one."""
        names = [path.stem for path in self.data]
        given: tuple[tuple[str, Sequence[object]], ...] = (
            ("--data", names),
            ("--context", self.contexts),
            ("--dtype", self.dtypes),
        )
        for option, values in given:
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice or not values:
                problem = f"{option}: {f'{twice[0]} is given twice' if twice else 'none is given'}"
                allowed = "at least one, each once; data sets are called by the name of their file"
                raise ConfigurationError(problem, allowed=allowed, remedy="Repeat the option for several.")
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


def check_model(evaluation: Evaluation, model: Model, longest_prompt: int) -> None:
    """Refuse a job that this model cannot do; the longest prompt is given in tokens.

    Raises:
        ConfigurationError: If vLLM refuses FP16 for it, a context is longer than the model's, or leaves no token for
            the response to the longest prompt.
    """
    model.require_dtypes("--dtype", evaluation.dtypes)
    most = model.context or evaluation.longest_context
    for context in evaluation.contexts:
        if not longest_prompt < context <= most:
            problem = f"the longest prompt has {longest_prompt} tokens, and the model's context {model.context}"
            allowed = f"{longest_prompt + 1} to {most}"
            raise ConfigurationError(problem, setting="--context", value=context, allowed=allowed)
