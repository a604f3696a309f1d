"""A job of two prompts, three responses each; nothing sampled yet."""

from collections.abc import Callable
from contextlib import closing

import pytest

from verl_precision.tools.gap.pairs.settings import MismatchJob
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.store import Store

PROMPTS = [(5, 6), (7,)]


@pytest.fixture
def job_of() -> Callable[..., MismatchJob]:
    values = {"responses": 3, "max_response_tokens": 40}
    return lambda **changes: MismatchJob(**{**values, **changes})


@pytest.fixture
def store(tmp_path, job_of):
    with closing(Journal(tmp_path / "job", {})) as journal:
        yield Store(journal, job_of(), PROMPTS)
