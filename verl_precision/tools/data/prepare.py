"""Read a data set, check its columns and its size, and write it in verl's format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.tools.data.catalog import CATALOG, LAYOUTS, TEMPLATES, PaperDataSet, Question, Row, read_row
from verl_precision.tools.jobs.problems import read_rows, write_table
from verl_precision.tools.tiny_model import verl_row


def prepare(
    name: str,
    path: Path,
    template: str | None = None,
    source: Path | None = None,
    synthetic: bool = False,
    skip_size_check: bool = False,
) -> str:
    """Write a data set of the catalog as parquet in verl's format; return one line about it."""
    wanted = CATALOG[name]
    template = template or wanted.template
    if template not in TEMPLATES:
        raise ConfigurationError("no such template", setting="--template", value=template, allowed=", ".join(TEMPLATES))
    if synthetic and source is not None:
        problem = "--synthetic makes its own problems and --source reads a file"
        raise ConfigurationError(problem, remedy="Give one of them.")
    if synthetic:
        # 64 sums in the same prompts, for a machine without network.
        sums = [(first, second) for first in range(10, 100) for second in range(1, 10)][::12]
        questions = [Question(f"What is {a} + {b}?", str(a + b), "stand_in") for a, b in sums[:64]]
        rows: Sequence[Any] = questions
    else:
        rows = read_rows(source, "--source") if source else _download(wanted)
        questions = _questions(name, wanted, rows)
    counted = f"{len(questions)} distinct problems in {len(rows)} rows"
    note = "; made-up sums, not the data set" if synthetic else ""
    fewest, most = wanted.problems
    if not synthetic and not fewest <= len(questions) <= most:
        expected = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        note = f"; expected {expected} ({wanted.number_from})"
        if not skip_size_check:
            raise ConfigurationError(
                f"{name}: {counted}{note}. This is another data set, or the data set has changed",
                remedy="Check --source, or add --skip-size-check to write it anyway.",
            )
    origin = "stand-in" if synthetic else wanted.hub
    verl_rows = [_verl_row(wanted, question, index, template, origin) for index, question in enumerate(questions)]
    write_table(path, pyarrow.Table.from_pylist(verl_rows))
    return f"wrote {path}: {counted}, template {template}{note}"


def _download(wanted: PaperDataSet) -> Sequence[Row]:
    """Return all rows from Hugging Face, through its cache."""
    import datasets

    try:
        where = {"path": wanted.hub, "name": wanted.config, "data_files": wanted.data_file}
        splits = [datasets.load_dataset(**where, split=split) for split in wanted.splits]
    except (ConnectionError, OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise EnvironmentMismatchError(
            f"{wanted.hub} cannot be downloaded from Hugging Face ({type(error).__name__}: {error})",
            remedy="Give --source FILE with a copy of it, or --synthetic for a few sums.",
        ) from error
    return datasets.concatenate_datasets(splits)


def _questions(name: str, wanted: PaperDataSet, rows: Sequence[Row]) -> list[Question]:
    """Return the distinct questions, in order; the first answer to a question counts."""
    columns = set(rows[0]) if len(rows) and isinstance(rows[0], Mapping) else set()
    needed = {layout: set(LAYOUTS[layout].values()) for layout in wanted.layouts}
    layout = next((layout for layout in needed if columns >= needed[layout]), None)
    if layout is None:
        raise ConfigurationError(
            f"{name}: its columns are {', '.join(sorted(columns)) or 'none'}",
            allowed=" or ".join(", ".join(sorted(names)) for names in needed.values()),
            remedy="Check --source, or whether the data set has changed.",
        )
    found: dict[str, Question] = {}
    for number, row in enumerate(rows):
        try:
            question = read_row(layout, row)
            if not question.text or not question.answer:
                raise ConfigurationError("empty question or answer")
        except (ConfigurationError, KeyError, TypeError, AttributeError) as error:
            remedy = "Correct the row, or remove it from the file."
            raise ConfigurationError(f"{name}, row {number}: {error}", remedy=remedy) from error
        found.setdefault(question.text, question)
    return list(found.values())


def _verl_row(wanted: PaperDataSet, question: Question, index: int, template: str, origin: str) -> dict[str, Any]:
    messages = TEMPLATES[template].items()
    prompt = [{"role": role, "content": text.replace("{question}", question.text)} for role, text in messages]
    # math_dapo reads both "Answer: ..." and \boxed{...}; MATH's own rule reads \boxed{...} alone.
    data_source = "math_dapo" if template == "dapo" else wanted.data_source
    about = {"index": index, "split": "+".join(wanted.splits), "origin": origin, "source": question.source}
    return verl_row(data_source, prompt, "math", question.answer, **about)
