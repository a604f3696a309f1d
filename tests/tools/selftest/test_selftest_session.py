"""The session with planted checks: what a user sees, finds on disk, and gets refused; the limit of a run."""

import json
import os
import sys

import psutil
import pytest
import torch
from digests import digest
from rich.console import Console

from verl_precision.base.errors import CheckFailedError, ConfigurationError, require
from verl_precision.tools.runs import launch
from verl_precision.tools.selftest import session
from verl_precision.tools.selftest.selftest_faults import FlippedBit, LostTensor
from verl_precision.tools.selftest.session import CHECKS, Check


def fails(device, folder):
    require(False, "the planted problem [of this test]", "Buy another machine.")


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    """Have planted checks alone."""
    for name in list(CHECKS):
        monkeypatch.delitem(CHECKS, name)
    figures = {"k3_kl": 0.123456, "layers": 29}
    monkeypatch.setitem(CHECKS, "passes", Check("what a pass looks like", lambda device, folder: figures))
    monkeypatch.setitem(CHECKS, "fails", Check("what a failure looks like", fails))
    monkeypatch.setitem(CHECKS, "has_gpu", Check("what a CPU cannot run", fails, needs_gpu="the planted reason"))


def test_command_shows_what_passed_and_what_failed(tmp_path, typed):
    words = ["selftest", "--output", tmp_path, "--only"]
    code, output = typed(*words, "passes", "--only", "fails")
    assert code == 1
    assert "k3_kl 0.123, layers 29" in output
    assert "CheckFailedError: the planted problem [of this test]. Buy another machine. Its run: " in output
    assert f"results: {tmp_path}" in output

    first = json.loads((tmp_path / session.REPORT).read_text())
    assert first["device"] == "cpu" and first["hardware"] and first["cores"] == os.cpu_count()
    assert {"python", "torch", "verl", "verl-precision", "transformers"} <= first["versions"].keys()
    passed, failed = first["checks"]
    assert (passed["name"], passed["status"]) == ("passes", "passed") and passed["seconds"] > 0
    assert passed["figures"] == {"k3_kl": 0.123456, "layers": 29}
    (folder,) = (tmp_path / "fails").iterdir()
    assert (failed["name"], failed["status"]) == ("fails", "failed") and str(folder) in failed["message"]

    assert typed(*words, "passes", "--only", "has_gpu")[0] == 0
    assert not (tmp_path / "has_gpu").exists() and len([*(tmp_path / "passes").iterdir()]) == 2, "a folder an attempt"
    second = json.loads((tmp_path / session.REPORT).read_text())["checks"]
    assert [(one["name"], one["status"]) for one in second] == [("passes", "passed"), ("has_gpu", "not run")]
    assert second[1]["message"] == "on a CPU: the planted reason"


def test_unknown_checks_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match="--only no_such: .*Allowed: passes, fails, has_gpu"):
        session.run_selftest(tmp_path / "out", "cpu", ["passes", "no_such"], Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_done_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "verl_command", lambda *of: [sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1)  # whatever the shell of the tests has made of SIGINT
    monkeypatch.setattr(session, "SECONDS", 1)
    before = set(psutil.Process().children())
    with pytest.raises(CheckFailedError, match="its run was not done after 1 s"):
        session._run("cuda", tmp_path)
    assert set(psutil.Process().children()) <= before


def test_planted_faults_damage_one_tensor():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sent = torch.randn(3, 5).to(dtype)
        before = sent.clone()
        ((name, arrived),) = FlippedBit._damaged(None, "weight", sent)
        assert name == "weight" and (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
        assert int((arrived != sent).sum()) == 1 and digest(arrived) != digest(sent)
        assert torch.equal(sent, before), "the trainer's tensor is as it was"
    assert LostTensor._damaged(None, "weight", sent) == []
