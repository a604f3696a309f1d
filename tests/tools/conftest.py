"""Made-up engines for the jobs that draw and score."""

import pytest
from made_up import MadeUp

from verl_precision.tools.gap.explain import session as explain_session
from verl_precision.tools.jobs import frame


@pytest.fixture
def made_up(monkeypatch) -> MadeUp:
    """Every engine that a job starts is made up."""
    made = MadeUp()
    monkeypatch.setattr(frame, "start_engine", made.start)
    monkeypatch.setattr(explain_session, "rounded_copy", lambda model, dtype, target: model)
    return made
