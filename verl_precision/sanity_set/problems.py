"""A data set in verl's format: read, checked, and written again with fewer rows."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from verl_precision.errors import ConfigurationError

REQUIRED = {
    "prompt": "a list of messages {role, content}",
    "data_source": "a name",
    "reward_model": "a mapping with ground_truth",
}


@dataclass(frozen=True)
class Problem:
    """One row.

    Attributes:
        identifier: digest of prompt, data source and ground truth; the same in every copy of the data set.
        row: its place in the file, from 0.
        prompt: chat messages.
        data_source: selects the reward function in verl.
        ground_truth: what the reward function compares with.
        extra_info: passed on to the reward function.
    """

    identifier: str
    row: int
    prompt: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class DataSet:
    """A file's rows as a table, and its distinct problems.

    Attributes:
        path: the file.
        table: all rows, with every column of the file.
        problems: distinct ones, in the file's order.
    """

    path: Path
    table: pyarrow.Table
    problems: list[Problem]

    @property
    def duplicates(self) -> int:
        """Rows that repeat an earlier one."""
        return self.table.num_rows - len(self.problems)

    @property
    def digest(self) -> str:
        """Digest of the problems, in their order."""
        return sha256("".join(problem.identifier for problem in self.problems).encode()).hexdigest()[:16]

    def write(self, path: Path, identifiers: Iterable[str]) -> None:
        """Write the rows of some problems as parquet, columns and types unchanged; it appears only when complete.

        Args:
            path: the file to write.
            identifiers: of the problems, in any order; rows are written in the file's order.
        """
        wanted = set(identifiers)
        rows = [problem.row for problem in self.problems if problem.identifier in wanted]
        scratch = path.with_suffix(".part")
        parquet.write_table(self.table.take(rows), scratch)
        os.replace(scratch, path)


def read_data_set(path: Path) -> DataSet:
    """Read a parquet or JSONL file with verl's columns: prompt, data_source, reward_model.ground_truth, extra_info.

    Args:
        path: ends in .parquet, .jsonl or .json (one row a line).

    Raises:
        ConfigurationError: naming file, row and field of the first thing that is wrong.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file. Allowed: a .parquet or .jsonl file with verl's columns.")
    table = read_table(path)
    if table.num_rows == 0:
        raise ConfigurationError(f"{path}: no rows in it.")
    for column, meaning in REQUIRED.items():
        if column not in table.column_names:
            raise ConfigurationError(
                f"{path}: no column {column!r} ({meaning}); there are {', '.join(table.column_names)}. Allowed: verl's "
                "format. `verl-precision data` writes it."
            )
    columns = [name for name in (*REQUIRED, "extra_info") if name in table.column_names]
    problems: dict[str, Problem] = {}
    for row, values in enumerate(table.select(columns).to_pylist()):
        problem = _problem(path, row, values)
        problems.setdefault(problem.identifier, problem)
    return DataSet(path, table, list(problems.values()))


def read_table(path: Path) -> pyarrow.Table:
    """Read a parquet or JSONL file as it is.

    Raises:
        ConfigurationError: if it cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        if path.suffix in (".jsonl", ".json"):
            lines = path.read_text(encoding="utf-8").splitlines()
            return pyarrow.Table.from_pylist([json.loads(line) for line in lines if line.strip()])
    except (ValueError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        raise ConfigurationError(
            f"{path}: cannot be read ({error}). Allowed: parquet, or one JSON object a line."
        ) from None
    raise ConfigurationError(f"{path}: unknown format {path.suffix!r}. Allowed: .parquet, .jsonl, .json.")


def _problem(path: Path, row: int, values: dict[str, Any]) -> Problem:
    def refuse(field: str, got: Any) -> ConfigurationError:
        meaning = REQUIRED[field.partition(".")[0]]
        return ConfigurationError(f"{path}, row {row}: {field} is {got!r}. Allowed: {meaning}. Correct the data set.")

    prompt, source, rewarded = (values[name] for name in REQUIRED)
    if not isinstance(prompt, list) or not prompt:
        raise refuse("prompt", prompt)
    for message in prompt:
        if not isinstance(message, dict) or not (message.get("role") and isinstance(message.get("content"), str)):
            raise refuse("prompt", message)
    if not source or not isinstance(source, str):
        raise refuse("data_source", source)
    if not isinstance(rewarded, dict):
        raise refuse("reward_model", rewarded)
    if rewarded.get("ground_truth") is None:
        raise refuse("reward_model.ground_truth", rewarded.get("ground_truth"))
    # Columns that parquet fills with null for other rows' keys do not make a problem another one.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    truth = rewarded["ground_truth"]
    content = json.dumps([messages, source, truth], sort_keys=True, ensure_ascii=False, default=str)
    identifier = sha256(content.encode()).hexdigest()[:16]
    return Problem(identifier, row, messages, source, truth, values.get("extra_info") or {})
