"""Prompts from a parquet or JSONL file, or built in."""

from pathlib import Path

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.model import Prompt
from verl_precision.tools.jobs.problems import is_chat, read_rows

BUILT_IN_NAME = "built-in"
BUILT_IN = Path(__file__).with_suffix(".txt")  # one question a line


def read_prompts(path: Path | None, field: str, limit: int | None) -> list[Prompt]:
    """Return the prompts, in the file's order.

    Args:
        path: A .parquet, .jsonl or .json file (one object a line); None for the built-in prompts, which are chats.
        field: Column of the prompts: verl's chat (a list of {role, content}) or plain text.
        limit: Number of prompts to use, from the first on; None for all.

    Raises:
        ConfigurationError: If there is no such file or field, or a prompt is empty.
    """
    if path is None:
        return [[{"role": "user", "content": text}] for text in BUILT_IN.read_text().splitlines()[:limit]]
    rows = read_rows(path, "--prompts")[:limit]
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
