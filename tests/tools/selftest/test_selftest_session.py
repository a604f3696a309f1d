"""The session with planted checks, each in a process of its own: what a user sees, finds on disk, and gets refused."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.selftest import session
from verl_precision.tools.selftest.checks import CHECKS
from verl_precision.weight_sync.manifest import digest

# Planted here, and in each process that is started, by its sitecustomize.py.
LIMIT = 4321
PLANTED = """
import os, signal, subprocess, sys
from pathlib import Path
from verl_precision.base.errors import require
from verl_precision.tools.selftest.checks import check

@check("passes", "what a pass looks like")
def passes(device, folder):
    print("device", device, "platform", os.environ.get("VERL_PLATFORM"))
    return {"k3_kl": 0.123456, "layers": 29}

@check("fails", "what a failure looks like")
def fails(device, folder):
    require(False, "the planted problem [of this test]", "Buy another machine.")

@check("dies", "a process that is killed", seconds=99_999)
def dies(device, folder):
    os.kill(os.getpid(), signal.SIGKILL)

@check("hangs", "a check that does not end", seconds=4321)
def hangs(device, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell of the tests has made of it
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    Path(folder, "child").write_text(str(child.pid))
    signal.pause()

@check("has_gpu", "what a CPU cannot run", needs_gpu="the planted reason")
def has_gpu(device, folder):
    pass
"""


@pytest.fixture(autouse=True)
def planted(tmp_path_factory, monkeypatch):
    """Have planted checks, alone in this process and beside the others in those that it starts."""
    modules = tmp_path_factory.mktemp("planted")
    (modules / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH")))))
    for name in list(CHECKS):
        monkeypatch.delitem(CHECKS, name)
    exec(compile(PLANTED, "planted", "exec"), {})
    yield
    for name in [*CHECKS]:
        del CHECKS[name]


def run(folder: Path, *names: str) -> dict[str, session.Outcome]:
    return {done.name: done for done in session.run_selftest(folder, "cpu", names, Console(quiet=True))}


def test_command_shows_what_passed_and_what_failed(tmp_path, typed):
    words = ["selftest", "--device", "cpu", "--output", tmp_path, "--only"]
    code, output = typed(*words, "passes", "--only", "fails")
    assert code == 1
    assert "k3_kl 0.123, layers 29" in output
    assert "CheckFailedError: the planted problem [of this test]. Buy another machine. Log: " in output
    assert f"results: {tmp_path}" in output

    first = json.loads((tmp_path / session.REPORT).read_text())
    assert first["device"] == "cpu" and first["hardware"] and first["cores"] == os.cpu_count()
    assert {"python", "torch", "verl", "verl-precision", "transformers"} <= first["versions"].keys()
    passed, failed = first["checks"]
    assert (passed["name"], passed["status"]) == ("passes", "passed") and passed["seconds"] > 0
    assert passed["figures"] == {"k3_kl": 0.123456, "layers": 29}
    assert (failed["name"], failed["status"]) == ("fails", "failed") and "the planted problem" in failed["message"]
    (log,) = (tmp_path / "passes").rglob("check.log")
    assert log.read_text() == "device cpu platform cpu\n"
    (log,) = (tmp_path / "fails").rglob("check.log")
    assert "Traceback" in log.read_text() and str(log) in failed["message"]

    second = run(tmp_path, "passes", "has_gpu")
    assert second["has_gpu"].message == "on a CPU: the planted reason" and not (tmp_path / "has_gpu").exists()
    found = json.loads((tmp_path / session.REPORT).read_text())["checks"]
    assert [(one["name"], one["status"]) for one in found] == [("passes", "passed"), ("has_gpu", "not run")]
    assert typed(*words, "passes")[0] == 0


def test_unknown_checks_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        run(tmp_path / "out", "passes", "no_such")
    assert caught.value.value == "no_such" and caught.value.allowed == "passes, fails, dies, hangs, has_gpu"
    assert not (tmp_path / "out").exists()


def test_late_check_is_ended_with_its_children_after_one_that_died(tmp_path, monkeypatch):
    now = time.monotonic
    monkeypatch.setattr(session.time, "monotonic", lambda: now() + LIMIT * any(tmp_path.rglob("child")))
    found = run(tmp_path, "dies", "hangs")
    assert found["dies"].status == "failed" and "ended by SIGKILL" in found["dies"].message
    assert found["hangs"].status == "failed" and f"not done after {LIMIT} s. Log: " in found["hangs"].message
    (child,) = (tmp_path / "hangs").rglob("child")
    statuses = {process.pid: process.info["status"] for process in psutil.process_iter(["status"])}
    nobody_waited = psutil.STATUS_ZOMBIE  # for what has ended after its parent was killed
    assert statuses.get(int(child.read_text()), nobody_waited) == nobody_waited
    content = json.loads((tmp_path / session.REPORT).read_text())
    assert [one["name"] for one in content["checks"]] == ["dies", "hangs"]


def test_planted_faults_damage_one_tensor():
    from verl_precision.tools.selftest.selftest_faults import FlippedBit, LostTensor

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sent = torch.randn(3, 5).to(dtype)
        before = sent.clone()
        ((name, arrived),) = FlippedBit._damaged(None, "weight", sent)
        assert name == "weight" and (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
        assert int((arrived != sent).sum()) == 1 and digest(arrived) != digest(sent)
        assert torch.equal(sent, before), "the trainer's tensor is as it was"
    assert LostTensor._damaged(None, "weight", sent) == []
