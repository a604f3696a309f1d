"""Made-up engines for the jobs that draw and score, and what such a job has on disk before it has drawn anything."""

from collections.abc import Callable
from contextlib import closing

import pytest
from made_up import MadeUp

from verl_precision.tools.gap.explain import session as explain_session
from verl_precision.tools.jobs import job
from verl_precision.tools.jobs.job import Store
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.settings import MismatchJob


@pytest.fixture
def made_up(monkeypatch) -> MadeUp:
    """Every engine that a job starts is made up."""
    made = MadeUp()
    monkeypatch.setattr(job, "EngineProcess", made.start)
    monkeypatch.setattr(explain_session, "rounded_copy", lambda model, dtype, target: model)
    return made


@pytest.fixture
def write_reward(tmp_path) -> Callable[[str], str]:
    """Write a reward function of this body; return its name."""

    def write(body: str) -> str:
        head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
        (tmp_path / "reward.py").write_text(f"{head}\n    {body}\n")
        return f"{tmp_path}/reward.py:compute_score"

    return write


@pytest.fixture
def reward_name(write_reward) -> str:
    """Name a reward function: the text after the last equals sign is the answer."""
    return write_reward("return float(solution_str.split('=')[-1] == ground_truth)")


@pytest.fixture
def store(tmp_path):
    """The store of two prompts with three responses each, all of them missing."""
    with closing(Journal(tmp_path / "job", {})) as journal:
        yield Store(journal, MismatchJob(responses=3, max_response_tokens=40), [(5, 6), (7,)])
