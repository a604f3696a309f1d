"""verl's own file logger over several starts of a run: nothing that was measured is lost."""

from collections import namedtuple
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import verl  # noqa: F401 - loads the plugin
from rubbish import FOREIGN
from verl.utils.tracking import FileLogger, Tracking

from verl_precision.integration.trainer import metrics_file
from verl_precision.tools.runs.read import read_metrics

Files = namedtuple("Files", "metrics pending superseded")


@pytest.fixture
def files(tmp_path, monkeypatch) -> Files:
    """The metrics file, and what may stand beside it."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    return Files(path, *(path.with_name(f"metrics.jsonl.{suffix}") for suffix in ("pending", "superseded")))


def started(resumed_at: int | None) -> Tracking:
    """Open the logger as a start of a run does; None: under verl's own trainer."""
    with nullcontext() if resumed_at is None else metrics_file.series_goes_on(resumed_at):
        return Tracking("project", "run", ["file"])


def train(tracking: Tracking, steps: range, reward: float) -> None:
    for step in steps:
        tracking.log({"reward": reward, "seen": np.float32(step)}, step)


def series(path) -> list[tuple[int, float]]:
    return [(row["step"], row["reward"]) for row in read_metrics(path)]


def test_verl_alone_empties_the_file(files):
    train(started(None), range(1, 4), 1.0)
    started(None)
    assert files.metrics.read_bytes() == b""


def test_a_resumed_run_has_one_row_a_step_and_the_steps_done_again_are_kept_aside(files):
    train(started(0), range(1, 6), 1.0)
    train(started(3), range(4, 7), 2.0)
    assert series(files.metrics) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert series(files.superseded) == [(4, 1), (5, 1)]
    train(started(6), range(7, 8), 3.0)
    assert [step for step, _ in series(files.metrics)] == list(range(1, 8))
    assert series(files.superseded) == [(4, 1), (5, 1)] and not files.pending.exists()


def test_a_run_from_scratch_starts_a_series_and_the_former_one_is_kept(files):
    train(started(0), range(1, 4), 1.0)
    train(started(0), range(1, 3), 2.0)
    train(started(0), range(1, 2), 3.0)
    assert series(files.metrics) == [(1, 3)]
    assert series(files.superseded) == [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]


def test_a_line_that_is_no_row_is_kept_aside_and_costs_no_other(files):
    train(started(0), range(1, 3), 1.0)
    odd = b'{"step": "2"}', b'{"step": NaN}', b'{"step": null}', b'{"step": 3, "data": {"rew'  # torn: of a killed run
    lines = *(line.replace(b"\n", b" ") for line in FOREIGN.values()), *odd
    with files.metrics.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
    train(started(2), range(3, 4), 2.0)
    assert series(files.metrics) == [(1, 1), (2, 1), (3, 2)]
    aside = files.superseded.read_bytes()
    assert all(line in aside for line in lines)


def test_a_start_that_is_killed_loses_nothing(files, monkeypatch):
    """Killed after verl has emptied the file and before the rows are back."""
    train(started(0), range(1, 5), 1.0)
    before = files.metrics.read_bytes()
    emptied = type("Emptied", (FileLogger,), {"fp": property(fset=Mock(side_effect=KeyboardInterrupt))})
    with metrics_file.series_goes_on(4), pytest.raises(KeyboardInterrupt):
        emptied("project", "run")
    assert files.metrics.read_bytes() == b"" and files.pending.read_bytes() == before
    started(4)
    assert files.metrics.read_bytes() == before


def test_the_path_is_verls(tmp_path, monkeypatch):
    """Without the variable for the whole path, as recipes run."""
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    train(started(0), range(1, 3), 1.0)
    path = tmp_path / "project" / "run.jsonl"
    assert started(2).logger["file"].filepath == str(path) and [step for step, _ in series(path)] == [1, 2]
