"""Prompts: from a parquet or JSONL file, or built in; as token ids, so that both engines see the same ones."""

import json
from pathlib import Path
from typing import Any

from verl_precision.errors import ConfigurationError

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

Prompt = str | list[dict[str, Any]]


def read_prompts(path: Path | None, field: str, limit: int | None) -> list[Prompt]:
    """Return the prompts, in the file's order.

    Args:
        path: .parquet, .jsonl or .json (one object a line); None for the built-in ones, which are chats.
        field: the column: verl's chat (a list of {role, content}) or plain text.
        limit: use only so many, from the first on.

    Raises:
        ConfigurationError: if there is no such file, it has no such field, or a prompt is empty.
    """
    if path is None:
        return [[{"role": "user", "content": text}] for text in BUILT_IN[:limit]]
    if not path.is_file():
        raise ConfigurationError(f"--prompts {path}: no such file. Allowed: a .parquet or .jsonl file.")
    rows = _rows(path)[:limit]
    if not rows:
        raise ConfigurationError(f"--prompts {path}: the file has no rows. Allowed: one prompt a row.")
    prompts: list[Prompt] = []
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
                "not empty, or a list of {role, content} that is not empty."
            )
        prompts.append(row[field])
    return prompts


def _rows(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            return parquet.read_table(path).to_pylist()
        except ArrowInvalid as error:
            raise ConfigurationError(f"--prompts {path}: not a parquet file ({error}).") from error
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigurationError(f"--prompts {path}: allowed is .parquet, or .jsonl with one JSON object a line.")
    rows = []
    for number, line in enumerate(path.read_text().splitlines()):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigurationError(
                    f"--prompts {path}: line {number + 1} is not JSON ({error}). Allowed: one object a line."
                ) from error
    return rows


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in value)
    )


def tokenised(prompts: list[Prompt], tokenizer: Any) -> list[list[int]]:
    """Return token ids: chats through the model's template, with the assistant's turn begun; text as it is.

    Args:
        prompts: of one of the two kinds each.
        tokenizer: of the model.

    Raises:
        ConfigurationError: for chats where the model has no chat template, and for a prompt of no tokens.
    """
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        elif tokenizer.chat_template is None:
            raise ConfigurationError(
                f"--prompts: prompt {number} is a chat, and the model's tokenizer has no chat template. Allowed: plain "
                "text. Give a file whose --prompt-field holds text."
            )
        else:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigurationError(f"--prompts: prompt {number} ({str(prompt)[:80]!r}) has no tokens.")
        found.append(list(ids))
    return found
