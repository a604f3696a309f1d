"""Options that several jobs share; each is declared once, in a class whose fields are the command's options."""

import re
from pathlib import Path
from typing import ClassVar

from verl_precision.base.dtypes import Arithmetic
from verl_precision.base.settings import command_option, option, settings

BUILT_IN_PROMPTS = "built-in"
FLASH = "flash_attention_2"  # computes in 16 bits only


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
