"""Prompts from a parquet or JSONL file, or built in."""

from pathlib import Path
from typing import Any

from verl_precision.errors import ConfigurationError
from verl_precision.sampling.model import Prompt
from verl_precision.sampling.problems import read_rows

BUILT_IN_NAME = "built-in"
BUILT_IN = (
    "What is 17 times 23? Think step by step.",
    "A train leaves at 9:40 and arrives at 13:05. How long did it travel?",
    "Find all real x with x^2 - 5x + 6 = 0.",
    "How many positive divisors does 360 have?",
    "The sum of three consecutive integers is 72. What are they?",
    "What is the remainder when 2^100 is divided by 7?",
    "A right triangle has legs 9 and 40. How long is its hypotenuse?",
    "In how many ways can the letters of LEVEL be arranged?",
    "Simplify (3/4 + 5/6) / (7/12).",
    "A fair coin is tossed five times. What is the probability of exactly three heads?",
    "If f(x) = 2x + 3 and g(x) = x^2, what is f(g(4))?",
    "What is the largest prime below 100?",
    "Write 0.363636... as a fraction in lowest terms.",
    "A square and a circle have the same area. What is the ratio of their perimeters?",
    "How many zeros are at the end of 50 factorial?",
    "Explain in two sentences why the square root of 2 is irrational.",
)


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
        return [[{"role": "user", "content": text}] for text in BUILT_IN[:limit]]
    rows = read_rows(path)[:limit]
    if not rows:
        raise ConfigurationError(f"--prompts {path}: the file has no rows. Allowed: one prompt a row. Check the file.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or field not in row:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ConfigurationError(
                f"--prompts {path}: row {number} has no field {field!r} (it has: {found}). Allowed: text, or a list of "
                "{role, content}, in that field. Name yours with --prompt-field."
            )
        if not _is_prompt(row[field]):
            raise ConfigurationError(
                f"--prompts {path}: field {field!r} of row {number} is {str(row[field])[:80]!r}. Allowed: text that is "
                "not empty, or a list of {role, content} that is not empty. Correct it, or leave the row out."
            )
    return [row[field] for row in rows]


def _is_prompt(value: Any) -> bool:
    if not isinstance(value, str | list) or not value:
        return False
    return isinstance(value, str) or all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
