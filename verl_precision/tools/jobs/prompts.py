"""Prompts from a parquet or JSONL file, or built in."""

from pathlib import Path

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.model import Model, Prompt, tokenize
from verl_precision.tools.jobs.problems import is_chat, read_rows
from verl_precision.tools.jobs.settings import BUILT_IN_PROMPTS, PromptedJob

_QUESTIONS = Path(__file__).with_suffix(".txt")  # one a line


def prompt_tokens(job: PromptedJob, model: Model, sampler: Model, response_tokens: int) -> list[tuple[int, ...]]:
    """Return a job's prompts as tokens.

    Args:
        job: Names the prompts.
        model: Has the tokenizer.
        sampler: Has the context.
        response_tokens: Tokens that an engine needs after a prompt.

    Raises:
        ConfigurationError: If the prompts cannot be read, or do not fit the context with their responses.
    """
    token_ids = tokenize(read_prompts(job.prompts, job.prompt_field, job.max_prompts), model)
    longest = max(map(len, token_ids))
    if sampler.context is not None and longest + response_tokens > sampler.context:
        spare = response_tokens - job.max_response_tokens
        raise ConfigurationError(
            f"the longest prompt has {longest} tokens, and the model's context {sampler.context}",
            setting="--max-response-tokens",
            value=job.max_response_tokens,
            allowed=f"up to {max(sampler.context - longest - spare, 0)}",
            remedy="Lower it, or leave long prompts out.",
        )
    return token_ids


def read_prompts(path: str, field: str = "prompt", limit: int | None = None) -> list[Prompt]:
    """Return the prompts, in the file's order.

    Args:
        path: A .parquet, .jsonl or .json file (one object a line), or `built-in`: the questions of this package.
        field: Column of the prompts: verl's chat (a list of {role, content}) or plain text.
        limit: Number of prompts to use, from the first on; None for all.

    Raises:
        ConfigurationError: If there is no such file or field, or a prompt is empty.
    """
    if path == BUILT_IN_PROMPTS:
        return [[{"role": "user", "content": text}] for text in _QUESTIONS.read_text().splitlines()[:limit]]
    rows = read_rows(Path(path), "--prompts")[:limit]
    if not rows:
        raise ConfigurationError(f"--prompts {path}: the file has no rows", allowed="one prompt a row")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or field not in row:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ConfigurationError(
                f"--prompts {path}: row {number} has no field {field!r} (it has: {found})",
                allowed="text, or a list of {role, content}, in that field",
                remedy="Name yours with --prompt-field.",
            )
        prompt = row[field]
        if not (is_chat(prompt) or (isinstance(prompt, str) and prompt)):
            raise ConfigurationError(
                f"--prompts {path}: field {field!r} of row {number} is {str(prompt)[:80]!r}",
                allowed="text that is not empty, or a list of {role, content} that is not empty",
                remedy="Correct it, or leave the row out.",
            )
    return [row[field] for row in rows]
