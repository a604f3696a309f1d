"""Prompts and problems: data sets in verl's format, plain prompts, and those that are built in."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_file
from verl_precision.tools.engines.model import Model, Prompt, tokenize
from verl_precision.tools.jobs.settings import BUILT_IN_PROMPTS, PromptedJob

_QUESTIONS = Path(__file__).with_name("prompts.txt")  # one a line
REQUIRED = {
    "prompt": "a list of messages {role, content}",
    "data_source": "a name",
    "reward_model": "a mapping with ground_truth",
}


@dataclass(frozen=True)
class Problem:
    """One row."""

    identifier: str  # digest of prompt, data source and ground truth; the same in every copy of the data set
    row: int  # number of the row in the file, from 0
    prompt: list[dict[str, Any]]  # chat messages
    data_source: str  # selects the reward function in verl
    ground_truth: Any  # what the reward function compares with
    extra_info: dict[str, Any]  # passed on to the reward function


@dataclass(frozen=True)
class DataSet:
    """A file's rows as a table, and its distinct problems."""

    table: pyarrow.Table  # all rows, with every column of the file
    problems: list[Problem]  # in the file's order

    @property
    def duplicates(self) -> int:
        """Rows that repeat an earlier one."""
        return self.table.num_rows - len(self.problems)

    @property
    def digest(self) -> str:
        """Digest of the problems, in their order."""
        return sha256("".join(problem.identifier for problem in self.problems).encode()).hexdigest()[:16]

    def write(self, path: Path, identifiers: Iterable[str]) -> None:
        """Write the rows of some problems as parquet, in the file's order, with columns and types unchanged."""
        wanted = set(identifiers)
        rows = [problem.row for problem in self.problems if problem.identifier in wanted]
        with new_file(path, replace=True) as scratch:
            parquet.write_table(self.table.take(rows), scratch)


def read_data_set(path: Path) -> DataSet:
    """Read a parquet or JSONL file with verl's columns: prompt, data_source, reward_model.ground_truth, extra_info.

    The first thing that is wrong is refused with its file, row and field.
    """
    table = _read_table(path)
    if table.num_rows == 0:
        raise ConfigurationError(f"{path}: no rows in it", allowed="one problem a row", remedy="Check the file.")
    for column, meaning in REQUIRED.items():
        if column not in table.column_names:
            raise ConfigurationError(
                f"{path}: no column {column!r} ({meaning}); there are {', '.join(table.column_names)}",
                allowed="verl's format",
                remedy="`verl-precision data` writes it.",
            )
    columns = [name for name in (*REQUIRED, "extra_info") if name in table.column_names]
    problems: dict[str, Problem] = {}
    for row, values in enumerate(table.select(columns).to_pylist()):
        problem = _problem(path, row, values)
        problems.setdefault(problem.identifier, problem)
    return DataSet(table, list(problems.values()))


def read_rows(path: Path, option: str = "") -> list[Any]:
    """Return the rows of a .parquet, .jsonl or .json file (one row a line); rows of the latter may differ in fields.

    Errors call the file by its `option`.
    """
    name = f"{option} {path}".strip()
    allowed = ".parquet, or .jsonl with one JSON object a line"
    if not path.is_file():
        raise ConfigurationError(f"{name}: no such file", allowed=allowed, remedy="Check the path.")
    if path.suffix == ".parquet":
        return _read_table(path).to_pylist()
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigurationError(f"{name}: unknown format {path.suffix!r}", allowed=allowed)
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            problem = f"{name}, line {number}: cannot be read as JSON ({error})"
            raise ConfigurationError(problem, allowed="one JSON object a line") from None
    return rows


def prompt_tokens(job: PromptedJob, model: Model, sampler: Model, response_tokens: int) -> list[tuple[int, ...]]:
    """Return a job's prompts as tokens of `model`; `response_tokens` more must fit the context of `sampler`."""
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
    """Return the first prompts of a .parquet, .jsonl or .json file (one object a line), or the `built-in` questions.

    The column of the prompts has verl's chats (lists of {role, content}) or plain text.
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


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages {role, content}, and not an empty one."""

    def is_message(message: Any) -> bool:
        fits = isinstance(message, dict) and isinstance(message.get("content"), str | list)
        return fits and bool(message.get("role"))

    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def _read_table(path: Path) -> pyarrow.Table:
    rows = None if path.suffix == ".parquet" and path.is_file() else read_rows(path)
    try:
        return parquet.read_table(path) if rows is None else pyarrow.Table.from_pylist(rows)
    except (ValueError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        problem = f"{path}: cannot be read ({error})"
        raise ConfigurationError(problem, allowed="parquet, or one JSON object a line") from None


def _problem(path: Path, row: int, values: dict[str, Any]) -> Problem:
    prompt, source, rewarded = (values[name] for name in REQUIRED)
    truth = rewarded.get("ground_truth") if isinstance(rewarded, dict) else None
    right = (is_chat(prompt), source and isinstance(source, str), truth is not None)
    for field, fits in zip(REQUIRED, right, strict=True):
        if not fits:
            problem = f"{path}, row {row}: {field} is {values[field]!r}"
            raise ConfigurationError(problem, allowed=REQUIRED[field], remedy="Correct the data set.")
    # Columns that parquet fills with null for other rows' keys do not make a problem another one.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    content = json.dumps([messages, source, truth], sort_keys=True, ensure_ascii=False, default=str)
    identifier = sha256(content.encode()).hexdigest()[:16]
    return Problem(identifier, row, messages, source, truth, values.get("extra_info") or {})
