"""A run that fails says why and leaves nothing behind."""

import signal
import subprocess
import sys
import uuid

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_precision.errors import RunFailedError
from verl_precision.processes import RUN_MARK, end_processes, marked_processes
from verl_precision.runs.launch import quoted, run_verl, verl_command


def test_command_is_what_a_user_would_type(root):
    command = verl_command(root / "recipes/quickstart/quickstart.yaml", ["precision=fp16"])
    assert command[1:] == [
        *("-m", "verl.trainer.main_ppo", "--config-dir", str(root / "recipes/quickstart")),
        *("--config-name", "quickstart", "precision=fp16"),
    ]


def test_failure_names_log_and_reason_within_seconds(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    seen = []
    with pytest.raises(RunFailedError) as caught:
        run_verl(
            root / "recipes/quickstart/quickstart.yaml",
            ["actor_rollout_ref.model.path=/models/typo"],
            tmp_path / "run",
            seen.append,
        )
    message = str(caught.value)
    assert "exit code 1" in message and str(tmp_path / "run/train.log") in message
    assert "verl_precision: actor_rollout_ref.model.path='/models/typo'" in message
    assert "Started a local Ray" not in (tmp_path / "run/train.log").read_text(), "refused before Ray starts"
    assert seen and seen[-1].step == 0


def test_a_folder_with_results_is_never_written_to(tmp_path, root):
    with pytest.raises(FileExistsError):
        run_verl(root / "recipes/quickstart/quickstart.yaml", [], tmp_path, print)


def test_processes_of_a_run_are_ended_and_no_others(tmp_path, hear_ctrl_c):
    """A driver that ignores Ctrl-C, with a detached child that ignores everything but SIGKILL."""
    import os

    mark, other = uuid.uuid4().hex, uuid.uuid4().hex
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
    )
    driver = (
        "import subprocess, sys, time\n"
        f"c = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True, stdout=subprocess.PIPE)\n"
        "c.stdout.readline(); print('ready', flush=True)\n"
        "time.sleep(300)\n"
    )

    def start(script: str, value: str) -> subprocess.Popen:
        environment = {**os.environ, RUN_MARK: value}
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=hear_ctrl_c,
        )

    ours, theirs = start(driver, mark), start("print('ready', flush=True); import time; time.sleep(300)", other)
    try:
        assert ours.stdout.readline() == theirs.stdout.readline() == "ready\n"
        assert len(marked_processes(mark)) == 2
        end_processes(ours, mark)
        assert marked_processes(mark) == []
        assert ours.returncode == -signal.SIGINT
        assert theirs.poll() is None, "a process of another run is not ours to end"
    finally:
        theirs.kill()
        theirs.wait()


@pytest.mark.parametrize("name", ["plain-1_2.3", "ratio=shadow", "it's", "a,b", "{a}[b]", "two words", "(x):y"])
def test_a_folder_may_have_any_name(name, tmp_path):
    """Hydra reads `=`, `,` and brackets in a value as its own grammar unless it is quoted."""
    (override,) = OverridesParser.create().parse_overrides([f"hydra.run.dir={quoted(tmp_path / name)}"])
    assert override.value() == str(tmp_path / name)
