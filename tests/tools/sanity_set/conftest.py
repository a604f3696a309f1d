"""Responses to a data set, and a job that replays them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.sanity_set.session import build_sanity_set
from verl_precision.tools.sanity_set.settings import SanitySet


@pytest.fixture
def record(write_rows) -> Callable[..., Path]:
    """Write a recorded response for each verdict: one row a problem, one column a response."""

    def write(path: Path, data: Path, verdicts: Sequence[Sequence[bool]], tokens: int = 10) -> Path:
        lines = [
            {"problem": problem.identifier, "response": index, "correct": correct, "tokens": tokens}
            for problem, each in zip(read_data_set(data).problems, verdicts, strict=True)
            for index, correct in enumerate(each)
        ]
        return write_rows(path, lines)

    return write


@pytest.fixture
def replay(tmp_path, row, write_rows, record) -> Callable:
    """Build a sanity set from verdicts; returns the summary and the folder."""

    def run(verdicts: Sequence[Sequence[bool]], folder: str = "out", **options):
        data = tmp_path / "data.jsonl"
        if not data.exists():
            write_rows(data, [row(number) for number in range(len(verdicts))])
        replayed = record(tmp_path / "recorded.jsonl", data, verdicts)
        values = {"data": data, "model": "recorded", "output": tmp_path / folder, "replayed": replayed}
        job = SanitySet(**{**values, "responses_per_problem": len(verdicts[0]), **options})
        return build_sanity_set(job, Console(quiet=True)), tmp_path / folder

    return run
