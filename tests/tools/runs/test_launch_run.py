"""A run says what it is doing, and why it failed, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import uuid

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_precision.base.errors import RunFailedError
from verl_precision.tools.runs.launch import (
    RUN_MARK,
    STAGES,
    TOTAL_STEPS,
    end_processes,
    marked_processes,
    quoted,
    run_verl,
    stage_of,
    verl_command,
)

# Lines as verl 0.9.1, Ray 2.60 and vLLM 0.28 print them, one a stage.
LOG = [
    "INFO:2026-11-21 04:07:21,712:verl_precision 0.1.0 loaded into verl 0.9.1: platform cpu",
    "2026-11-21 04:07:31,150 INFO worker.py:2029 -- Started a local Ray instance.",
    "(TaskRunnerV1 pid=1) INFO:train and validate dataloader initialized, train dataset size: 64",
    "(WorkerDict pid=2) INFO:Platform override from VERL_PLATFORM: cpu",
    "(vLLMHttpServer pid=3) WARNING 11-21 04:08:33 [vllm.py:1285] Enforce eager set",
    "(vLLMHttpServer pid=3) (EngineCore pid=4) WARNING Model Runner V2 requires Triton",
    "(AgentLoopWorkerTQ pid=5) Using dataset class: RLHFDataset",
]
RECIPE = "recipes/quickstart/quickstart.yaml"


def test_stages_are_reached_in_order_and_never_left_backwards():
    assert [stage_of(line, index - 1) for index, line in enumerate(LOG)] == list(range(len(STAGES)))
    assert stage_of(LOG[-1], -1) == len(STAGES) - 1, "a skipped stage does not hold up the later ones"
    assert stage_of(LOG[0], 4) == 4 and stage_of("anything", 2) == 2
    line = "(TaskRunnerV1 pid=1) Training Progress:  25%|##5       | 1/4 [01:13<03:41, 73.82s/it]"
    assert TOTAL_STEPS.search(line).group(1) == "4"


def test_command_is_what_a_user_would_type(root):
    typed = f"-m verl.trainer.main_ppo --config-dir {root}/recipes/quickstart --config-name quickstart precision=fp16"
    assert verl_command(root / RECIPE, ["precision=fp16"])[1:] == typed.split()


def test_failure_names_log_and_reason_within_seconds(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    seen, folder = [], tmp_path / "run"
    with pytest.raises(RunFailedError) as caught:
        run_verl(root / RECIPE, ["actor_rollout_ref.model.path=/models/typo"], folder, seen.append)
    message = str(caught.value)
    assert "exit code 1" in message and str(folder / "train.log") in message
    assert "verl_precision: actor_rollout_ref.model.path='/models/typo'" in message
    assert "Started a local Ray" not in (folder / "train.log").read_text(), "refused before Ray starts"
    assert seen and seen[-1].step == 0


def test_a_folder_with_results_is_never_written_to(tmp_path, root):
    with pytest.raises(FileExistsError):
        run_verl(root / RECIPE, [], tmp_path, print)


def test_processes_of_a_run_are_ended_and_no_others(hear_ctrl_c):
    """A driver with a detached child that ignores everything but SIGKILL, and a process of another run."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
    wait = "print('ready', flush=True); import time; time.sleep(300)"
    driver = (
        "import subprocess, sys\n"
        f"c = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True, stdout=subprocess.PIPE)\n"
        f"c.stdout.readline(); {wait}"
    )

    def start(script: str, mark: str) -> subprocess.Popen:
        command, environment = [sys.executable, "-c", script], {**os.environ, RUN_MARK: mark}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)

    mark = uuid.uuid4().hex
    ours, theirs = start(driver, mark), start(wait, uuid.uuid4().hex)
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
