"""A job of two prompts, three responses each; nothing sampled yet."""

from contextlib import closing

import pytest
from made import PROMPTS, job_of

from verl_precision.offline_mismatch.store import Store
from verl_precision.sampling.journal import open_journal


@pytest.fixture
def store(tmp_path):
    with closing(open_journal(tmp_path / "job", {})) as journal:
        yield Store(journal, job_of(), PROMPTS)
