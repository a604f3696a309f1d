"""Read a data set, check its columns and its size, and write it in verl's format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from verl_precision.data.catalog import Entry, entry
from verl_precision.data.layouts import LAYOUTS, Question
from verl_precision.data.stand_in import stand_in_rows
from verl_precision.data.templates import TEMPLATES
from verl_precision.errors import ConfigurationError, EnvironmentMismatchError

Rows = Sequence[Mapping[str, Any]]


def prepare(
    name: str,
    path: Path,
    template: str | None = None,
    source: Path | None = None,
    stand_in: bool = False,
    any_count: bool = False,
) -> str:
    """Write a data set as parquet in verl's format.

    Args:
        name: key of the catalog.
        path: the file to write.
        template: key of `TEMPLATES`; None for the data set's usual one.
        source: a parquet or JSONL file with the data set's own columns, instead of a download.
        stand_in: a few sums in its columns instead, without network.
        any_count: write it though the number of problems is not the expected one.

    Returns:
        What was written, in one line.

    Raises:
        ConfigurationError: naming what does not fit.
        EnvironmentMismatchError: if the hub cannot be reached.
    """
    wanted = entry(name)
    template = template or wanted.template
    if template not in TEMPLATES:
        raise ConfigurationError("no such template", setting="--template", value=template, allowed=", ".join(TEMPLATES))
    if stand_in and source is not None:
        raise ConfigurationError(
            "--stand-in makes its own problems and --source reads a file", remedy="Give one of them."
        )
    rows = stand_in_rows(wanted.layouts[0]) if stand_in else _read(source) if source else download(wanted)
    questions = _questions(name, wanted, rows)
    counted = f"{len(questions)} distinct problems in {len(rows)} rows"
    note = "; a stand-in, not the data set" if stand_in else ""
    if not stand_in and not wanted.fewest <= len(questions) <= wanted.most:
        expected = f"{wanted.fewest}" if wanted.fewest == wanted.most else f"{wanted.fewest} to {wanted.most}"
        note = f"; expected {expected} ({wanted.said_by})"
        if not any_count:
            raise ConfigurationError(
                f"{name}: {counted}{note}. It is not the data set of the paper, or it has changed",
                remedy="Check --source, or give --any-count to write it nevertheless.",
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(_verl_rows(wanted, questions, template, stand_in)), path)
    return f"wrote {path}: {counted}, template {template}{note}"


def download(wanted: Entry) -> Rows:
    """Return all rows from Hugging Face, through its cache.

    Raises:
        EnvironmentMismatchError: if it is neither reachable nor cached.
    """
    import datasets

    try:
        splits = [datasets.load_dataset(wanted.hub, data_files=wanted.data_files, split=s) for s in wanted.splits]
    except (ConnectionError, OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentMismatchError(
            f"{wanted.hub} cannot be had from Hugging Face ({type(error).__name__}: {reason})",
            remedy="Give --source FILE with a copy of it, or --stand-in for a few sums in its columns.",
        ) from error
    return datasets.concatenate_datasets(splits)


def _read(source: Path) -> Rows:
    if not source.is_file():
        raise ConfigurationError("no such file", setting="--source", value=source, allowed=".parquet or .jsonl")
    from verl_precision.sampling.problems import read_table

    return read_table(source).to_pylist()


def _questions(name: str, wanted: Entry, rows: Rows) -> list[Question]:
    """Return the distinct questions, in order; the first answer to a question counts."""
    columns = set(rows[0]) if len(rows) else set()
    layouts = [LAYOUTS[key] for key in wanted.layouts]
    layout = next((layout for layout in layouts if columns >= set(layout.columns)), None)
    if layout is None:
        allowed = " or ".join(", ".join(layout.columns) for layout in layouts)
        raise ConfigurationError(
            f"{name}: its columns are {', '.join(sorted(columns)) or 'none'}",
            allowed=allowed,
            remedy="Check --source, or look whether the data set has changed.",
        )
    found: dict[str, Question] = {}
    for number, row in enumerate(rows):
        try:
            question = layout.read(row)
        except (ConfigurationError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{name}, row {number}: {error}", remedy="Correct the file, or leave the row out."
            ) from error
        if not question.text or not question.answer:
            raise ConfigurationError(f"{name}, row {number}: empty question or answer", remedy="Leave the row out.")
        found.setdefault(question.text, question)
    return list(found.values())


def _verl_rows(wanted: Entry, questions: Sequence[Question], template: str, stand_in: bool) -> list[dict[str, Any]]:
    # math_dapo reads both "Answer: ..." and \boxed{...}; MATH's own rule reads \boxed{...} alone.
    data_source = "math_dapo" if template == "dapo" else wanted.data_source
    return [
        {
            "data_source": data_source,
            "prompt": TEMPLATES[template](question.text),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {
                "index": index,
                "split": "+".join(wanted.splits),
                "origin": "stand-in" if stand_in else wanted.hub,
                "source": question.source,
            },
        }
        for index, question in enumerate(questions)
    ]
