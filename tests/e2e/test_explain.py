"""`explain` on real engines: an injected fault is found, and nothing else is called a fault.

`benchmarks/fault_injection.py` injects fifty (docs/fault_injection.md).
"""

import io
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import injected_faults

from verl_precision.tools.gap.explain.session import explain
from verl_precision.tools.jobs.settings import Explanation


@pytest.mark.matrix
def test_another_epsilon_is_found(tmp_path, monkeypatch):
    """A smaller one, in exact arithmetic, is found by the last test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(injected_faults.__file__).parent))  # for the processes of the engines
    job = Explanation(max_prompts=6, max_response_tokens=32, output=tmp_path)
    vllm = partial(injected_faults.faulty_vllm, faults={"epsilon": 100})
    result = explain(job, Console(file=io.StringIO()), vllm=vllm)
    by_cause = {finding.variant.cause: finding for finding in result.findings}
    assert [finding.variant.cause for finding in result.findings if finding.fault] == ["engine"]
    assert result.findings[0] is by_cause["engine"] and result.attribution.share(by_cause["engine"].part) > 0.8
    # What is healthy here: BF16 costs the same in both engines, within a fifth.
    for side in ("rollout_precision", "trainer_precision"):
        assert by_cause[side].part.size == pytest.approx(result.bf16_cost, rel=0.2)

    assert result.attribution.left_out == 0


SIZES = {"max_prompts": 4, "max_response_tokens": 24}


def test_in_exact_arithmetic_one_epsilon_shows_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(injected_faults.__file__).parent))
    vllm = partial(injected_faults.faulty_vllm, faults={"epsilon": 1.01})  # BF16 hides it
    job = Explanation(arithmetic="exact", packed=True, output=tmp_path / "planted", **SIZES)
    planted = explain(job, Console(file=io.StringIO()), vllm=vllm)
    assert [finding.variant.cause for finding in planted.findings if finding.fault] == ["engine"]
