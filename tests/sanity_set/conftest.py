"""A data set, responses to it, and a run that replays them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from verl_precision.sanity_set.problems import read_data_set
from verl_precision.sanity_set.session import Options, build_sanity_set
from verl_precision.sanity_set.verdict import Window


@pytest.fixture
def row() -> Callable[..., dict]:
    return make_row


@pytest.fixture
def write_rows() -> Callable[[Path, Sequence[dict]], Path]:
    return _write_rows


@pytest.fixture
def record() -> Callable[..., Path]:
    return _record


def make_row(number: int, **changes) -> dict:
    """One row in verl's format."""
    values = {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
    }
    return {**values, **changes}


def _write_rows(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(values) + "\n" for values in rows))
    return path


def _record(path: Path, data: Path, verdicts: Sequence[Sequence[bool]], tokens: int = 10) -> Path:
    """Write a recorded response for each verdict: one row a problem, one column a response."""
    lines = [
        {"problem": problem.identifier, "response": index, "correct": correct, "tokens": tokens}
        for problem, row_ in zip(read_data_set(data).problems, verdicts, strict=True)
        for index, correct in enumerate(row_)
    ]
    return _write_rows(path, lines)


@pytest.fixture
def replay(tmp_path) -> Callable:
    """Build a sanity set from verdicts; returns the summary and the folder."""

    def run(verdicts: Sequence[Sequence[bool]], folder: str = "out", window: Window | None = None, **options):
        data = tmp_path / "data.jsonl"
        if not data.exists():
            _write_rows(data, [make_row(number) for number in range(len(verdicts))])
        recorded = _record(tmp_path / "recorded.jsonl", data, verdicts)
        chosen = Options(
            data=data,
            model="recorded",
            output=tmp_path / folder,
            window=window or Window(len(verdicts[0])),
            recorded=recorded,
            **options,
        )
        return build_sanity_set(chosen, Console(quiet=True)), tmp_path / folder

    return run
