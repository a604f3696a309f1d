"""What `verl-precision mismatch` writes and refuses beside what every job does (tests/tools/jobs/test_contract.py)."""

import io
import json

import pytest
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.gap.pairs import session

FIGURES = ["tokens.png", "token_gaps.png", "sequences.png", "grid.png"]


@pytest.fixture
def measure(tmp_path, monkeypatch, job_of, made_up):
    """Measure two of the built-in prompts with made-up engines; return the pairs, and what is shown.

    The figures, which take seconds, are drawn in test_measure.py.
    """
    monkeypatch.setattr(session, "write_figures", lambda folder, pairs, title: FIGURES)

    def run(**changes):
        shown = io.StringIO()
        job = job_of(max_prompts=2, output=tmp_path / "job", **changes)
        return session.measure_mismatch(job, Console(file=shown, width=120)), shown.getvalue()

    return run


def test_every_pair_is_measured_on_the_same_responses(measure, made_up, tmp_path):
    pairs, shown = measure()
    assert len(made_up.seen) == 12 + 24 and len(pairs) == 4
    assert "3/6 responses sampled in fp16, scored in fp16" in shown and "wrote table.md, summary.json, tokens" in shown
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"journal.jsonl", "table.md", "summary.json"}
    assert json.loads((tmp_path / "job" / "summary.json").read_text())["prompt_count"] == 2


def test_other_settings_and_prompts_are_refused(measure, tmp_path, monkeypatch):
    measure()
    before = (tmp_path / "job" / "journal.jsonl").read_bytes()
    for changes, words in (
        ({"responses": 4, "attention": "flash_attention_2"}, "responses: 3 there, 4 now"),
        ({"rollout_dtypes": ("bf16",)}, r"rollout_dtypes: \['fp16', 'bf16'\] there, \['bf16'\] now"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            measure(**changes)
    monkeypatch.setattr(session, "prompt_tokens", lambda *_: [(1, 2)] * 2)
    with pytest.raises(ConfigurationError, match="prompt_token_ids: "):
        measure()
    assert (tmp_path / "job" / "journal.jsonl").read_bytes() == before
