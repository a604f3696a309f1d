"""pydantic's refusals, in the words of this package."""

import re
from typing import Literal

import pytest
from cases import cases
from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import command_option, settings


@settings(command_option)
class Example:
    model: str
    dtypes: tuple[Literal["fp16", "bf16"], ...] = Field(default=("fp16",), title="--dtype")
    max_tokens: int = Field(default=8, ge=1)

    def __post_init__(self):
        if self.max_tokens > 100 and self.model == "small":
            raise ConfigurationError("--max-tokens and --model: our own words")


def test_values_are_kept_and_frozen():
    example = Example(model="m", max_tokens=3)
    assert (example.model, example.dtypes, example.max_tokens) == ("m", ("fp16",), 3)
    with pytest.raises(AttributeError):
        example.max_tokens = 4


@pytest.mark.parametrize(("values", "words"), cases(__file__, "BLOCKS"))
def test_refusals_name_setting_value_allowed_and_remedy(values, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Example(**{"model": "m", **values})


def test_missing_given_by_position_and_spelt_otherwise():
    with pytest.raises(ConfigurationError, match="--model: it is missing. Allowed: str. Give a value."):
        Example()
    with pytest.raises(ConfigurationError, match="--dtype fp61: this cannot work"):
        Example("m", ("fp61",))

    @settings("mismatch.alarm.{}".format)
    class Block:
        window: int = Field(default=5, ge=1)

    with pytest.raises(ConfigurationError, match=r"mismatch\.alarm\.window=0: this cannot work"):
        Block(window=0)
