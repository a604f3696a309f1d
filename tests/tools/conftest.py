"""Made-up engines for the jobs that draw and score, and what such a job has on disk before it has drawn anything."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from made_up import MadeUp
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.tools.gap.explain import session as explain_session
from verl_precision.tools.gap.pairs.settings import MismatchJob
from verl_precision.tools.jobs import frame
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.store import Store


@pytest.fixture
def typed() -> Callable[..., tuple[int, str]]:
    """Type a command in this process; return its exit code, and its output with each run of spaces as one."""

    def run(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*map(str, words)])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, " ".join(done.output.split())

    return run


@pytest.fixture
def made_up(monkeypatch) -> MadeUp:
    """Every engine that a job starts is made up."""
    made = MadeUp()
    monkeypatch.setattr(frame, "start_engine", made.start)
    monkeypatch.setattr(explain_session, "rounded_copy", lambda model, dtype, target: model)
    return made


@pytest.fixture
def reward_file(tmp_path) -> Path:
    """A reward function: the text after the last equals sign is the answer."""
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.split('=')[-1] == ground_truth)\n"
    )
    return path


@pytest.fixture
def store(tmp_path):
    """The store of two prompts with three responses each, all of them missing."""
    with closing(Journal(tmp_path / "job", {})) as journal:
        yield Store(journal, MismatchJob(responses=3, max_response_tokens=40), [(5, 6), (7,)])
