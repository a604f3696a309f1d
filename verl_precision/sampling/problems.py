"""A data set in verl's format: read, checked, and written again with fewer rows."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from verl_precision.errors import ConfigurationError
from verl_precision.files import new_file

REQUIRED = {
    "prompt": "a list of messages {role, content}",
    "data_source": "a name",
    "reward_model": "a mapping with ground_truth",
}


@dataclass(frozen=True)
class Problem:
    """One row.

    Attributes:
        identifier: Digest of prompt, data source and ground truth; the same in every copy of the data set.
        row: Number of the row in the file, from 0.
        prompt: Chat messages.
        data_source: Selects the reward function in verl.
        ground_truth: What the reward function compares with.
        extra_info: Passed on to the reward function.
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
        path: The file.
        table: All rows, with every column of the file.
        problems: Distinct problems, in the file's order.
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
        """Write the rows of some problems as parquet, with columns and types unchanged.

        Args:
            path: The file to write; one that exists is replaced.
            identifiers: Identifiers of the problems, in any order; rows are written in the file's order.
        """
        wanted = set(identifiers)
        rows = [problem.row for problem in self.problems if problem.identifier in wanted]
        with new_file(path, replace=True) as scratch:
            parquet.write_table(self.table.take(rows), scratch)


def read_data_set(path: Path) -> DataSet:
    """Read a parquet or JSONL file with verl's columns: prompt, data_source, reward_model.ground_truth, extra_info.

    Args:
        path: A .parquet, .jsonl or .json file (one row a line).

    Raises:
        ConfigurationError: If something is wrong; it names file, row and field of the first such thing.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file. Allowed: a .parquet or .jsonl file with verl's columns.")
    table = read_table(path)
    if table.num_rows == 0:
        raise ConfigurationError(f"{path}: no rows in it. Allowed: one problem a row. Check the file.")
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
        ConfigurationError: If it cannot be read.
    """
    try:
        return parquet.read_table(path) if path.suffix == ".parquet" else pyarrow.Table.from_pylist(read_rows(path))
    except (ValueError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"{path}: cannot be read ({error}). Allowed: parquet, or one JSON object a line. Check the file."
        ) from None


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a parquet or JSONL file; rows of the latter may differ in their fields.

    Raises:
        ConfigurationError: If there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file. Allowed: a .parquet or .jsonl file. Check the path.")
    if path.suffix == ".parquet":
        return read_table(path).to_pylist()
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigurationError(
            f"{path}: unknown format {path.suffix!r}. Allowed: .parquet, or .jsonl with one JSON object a line."
        )
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigurationError(
                    f"{path}, line {number}: cannot be read as JSON ({error}). Allowed: one JSON object a line."
                ) from None
    return rows


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
