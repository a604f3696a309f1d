"""A run says how far it is and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from itertools import groupby
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from verl_precision.base.errors import RunFailedError
from verl_precision.tools.runs import launch

# Lines as verl 0.9.1, Ray 2.60 and vLLM 0.28 print them, one a stage.
LOG = Path(__file__).with_suffix(".txt").read_text().splitlines()
RECIPE = "recipes/quickstart/quickstart.yaml"


def test_stages_are_told_in_order_and_never_left_backwards(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_POLL_SECONDS", 0)
    log, metrics, told = tmp_path / "log", tmp_path / "metrics.jsonl", []
    progress = "(TaskRunnerV1 pid=1) Training Progress:  25%|##5       | 1/4 [01:13<03:41, 73.82s/it]"
    # One stage is skipped, and some come again.
    written = [(log, line) for line in (LOG[0], "anything", *LOG[1:-2], LOG[-1], *LOG[:3], progress)]
    coming = iter([*written, (metrics, "{}"), (metrics, "{}")])
    log.touch()

    def poll():
        path, line = next(coming, (None, ""))
        if path is None:
            return 0
        with path.open("a") as file:
            file.write(f"{line}\n")

    assert launch._follow(Mock(poll=poll), log, metrics, 0.0, lambda text, seconds: told.append(text)) == 0
    texts = [text for _, text in launch.STAGES]
    assert [text for text, _ in groupby(told)] == [*texts[:-2], texts[-1], "step 1/4", "step 2/4"]


def test_failure_names_log_and_reason_within_seconds(tmp_path, root, at_root):
    seen, folder = [], tmp_path / "run"
    with pytest.raises(RunFailedError) as caught:
        overrides = ["actor_rollout_ref.model.path=/models/typo"]
        launch.run_verl(root / RECIPE, overrides, folder, lambda text, seconds: seen.append(text))
    message = str(caught.value)
    assert "exit code 1" in message and str(folder / "train.log") in message
    assert "verl_precision: actor_rollout_ref.model.path='/models/typo'" in message
    assert "Started a local Ray" not in (folder / "train.log").read_text(), "refused before Ray starts"
    assert set(seen) <= {"starting verl", launch.STAGES[0][1]} and seen


# What `compare` does, with a stand-in for verl that ignores Ctrl-C and has a detached child.
STAND_IN = """
import pathlib, subprocess, sys, time
from verl_precision.tools.runs import launch
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
driver = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(600)"
)
launch.verl_command = lambda config, overrides: [sys.executable, "-c", driver]
launch._GRACE_SECONDS = 0.1
launch._ASKED_SECONDS = 0.5
launch.end_processes.__defaults__ = (0.1,)
folder = pathlib.Path(sys.argv[1])
mark = launch.uuid.uuid5(launch.uuid.NAMESPACE_URL, folder.resolve().as_uri()).hex

def show(stage, seconds):
    if len(launch.marked_processes(mark)) == 2 and not getattr(show, "said", False):
        show.said = print(mark, flush=True) is None

try:
    launch.run_verl(pathlib.Path("x.yaml"), [], folder, show, goes_on=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, hear_signals, monkeypatch):
    """Start a run of the stand-in; return its process and its mark, once it is under way."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    command = [sys.executable, str(tmp_path / "stand_in.py"), str(tmp_path / "run")]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def start() -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=hear_signals, start_new_session=True
        )
        return process, process.stdout.readline().strip()

    return start


@pytest.mark.parametrize("numbers", [[signal.SIGHUP], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]])
def test_a_signal_ends_every_process_and_leaves_no_folder_and_another_changes_nothing(stand_in, tmp_path, numbers):
    process, mark = stand_in()
    with subprocess.Popen(["sleep", "600"], env={launch.RUN_MARK: uuid.uuid4().hex}) as of_another_run:
        for number in numbers:
            process.send_signal(number)
        assert process.communicate(timeout=60)[0] == "interrupted\n" and process.returncode == 0
        assert launch.marked_processes(mark) == [] and not list(tmp_path.glob("vp-ray-*"))
        assert of_another_run.poll() is None
        of_another_run.kill()


def test_what_a_killed_start_has_left_goes_with_the_next_one(stand_in, tmp_path):
    killed, mark = stand_in()
    killed.kill()
    killed.communicate()
    left = launch.marked_processes(mark)
    assert len(left) == 2 and len(list(tmp_path.glob("vp-ray-*"))) == 1
    again, _ = stand_in()
    assert psutil.wait_procs(left, timeout=60)[1] == [] and len(list(tmp_path.glob("vp-ray-*"))) == 1
    again.send_signal(signal.SIGTERM)
    assert again.communicate(timeout=60)[0] == "interrupted\n"
    assert launch.marked_processes(mark) == [] and not list(tmp_path.glob("vp-ray-*"))


@pytest.mark.parametrize(("name", "there"), [("a b=c,d'e", True), ("pbs.12[3]", False), ("Läufe", False)])
def test_ray_has_a_folder_that_it_can_work_in(tmp_path, monkeypatch, name, there):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert launch.temporary_folder() == (str(tmp_path / name) if there else "/tmp")


def test_a_folder_with_results_is_never_written_to(tmp_path, root):
    with pytest.raises(FileExistsError):
        launch.run_verl(root / RECIPE, [], tmp_path, print)
