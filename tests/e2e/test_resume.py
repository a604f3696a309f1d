"""Ended in mid-run, then started again: one series of metrics, loss scale and growth counter go on exactly.
With `repeatable=bitwise` the weights are those of a run that was not ended, bit for bit. Ctrl-C ends everything.

A job of Slurm (a stand-in on this machine) comes to its time limit, and `compare` is killed, once each; what the
second has done twice is bit for bit the same. `make test-matrix` has a job ended ten times, by SIGTERM, by its time
limit and by kill -9, at random moments, beside one that was never ended; and `compare`, by four signals.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import slurm
import torch
from typer.testing import CliRunner

from verl_precision.base import owner
from verl_precision.base.overrides import quoted
from verl_precision.check.rules.gpu_memory import shape_of
from verl_precision.cli import app
from verl_precision.tools.runs.fork_server import fork_server
from verl_precision.tools.runs.launch import WORKER_PYTHON
from verl_precision.tools.runs.read import read_metrics

RECIPE, RUN = Path("recipes/quickstart/quickstart.yaml"), "recipes/launch/run.sh"
SCALE = "actor_rollout_ref.actor.fsdp_config.loss_scale"
STEPS = 4  # the growth counter has gone on where the scale grows at the last one
SETTINGS = [
    *("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2", f"trainer.total_training_steps={STEPS}"),
    *(f"{SCALE}.initial=1024", f"{SCALE}.growth_interval=4"),
]
REPEATABLE = ("+repeatable=bitwise", "actor_rollout_ref.rollout.n=4")
COMPARE = [sys.executable, "-m", "verl_precision.cli", "compare", str(RECIPE), "-p", "fp16"]
JOB = str(100_000 + os.getpid())
SECONDS = 600
# What a clock and the memory decide, and what counts from the start of a process, which a resumed run has two of.
CHANCE = ("timing", "weight_sync/seconds", "precision/bf16_crossings", "weight_sync/canary_bound")


def differing(one: list[dict[str, float]], other: list[dict[str, float]]) -> list[set[str]]:
    """Return the metrics of each step that differ in any bit, though the two runs are one run done twice."""
    steps = zip(one, other, strict=True)
    different = [{key for key in a.keys() | b.keys() if a.get(key) != b.get(key)} for a, b in steps]
    return [{key for key in keys if "perf/" not in key and not key.startswith(CHANCE)} for keys in different]


def assert_one_series(file, steps=STEPS):
    rows = read_metrics(file)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert not file.with_name("metrics.jsonl.pending").exists()
    for row in rows:
        grown = row["step"] // 4  # after the 4th update without overflow, whoever made it
        assert row["precision/skipped_steps"] == 0 and row["precision/loss_scale"] == 1024 * 2**grown
    return rows


@pytest.fixture
def queue(tmp_path):
    """A Slurm of one machine: (the folder of its commands, a function that submits a job)."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    environment = {
        **os.environ,
        **slurm.install(folder, JOB, Path(sys.executable).parent),
        **{"ACTIVATE": "/dev/null", "CPUS": "16", "VERL_FILE_LOGGER_ROOT": str(tmp_path)},
    }
    jobs = []

    def submit(*words: str) -> subprocess.Popen:
        jobs.append(subprocess.Popen([folder / "sbatch", *words], env=environment))
        return jobs[-1]

    yield folder, submit
    for job in jobs:
        job.kill()
        job.wait()
    slurm.kill_job(folder)
    for ray in Path("/tmp").glob(f"ray-{JOB}-*"):
        shutil.rmtree(ray)


@pytest.fixture
def words_of(tmp_path, fork_server):
    """The words for `sbatch` that run the quickstart under a name, with overrides."""
    return lambda name, *overrides: [
        *("recipes/launch/slurm.sbatch", str(RECIPE), "trainer.logger=[console,file]"),
        *(f"hydra.run.dir={tmp_path / 'hydra'}", *overrides),
        *(f"trainer.experiment_name={name}", f"trainer.default_local_dir={tmp_path / name}"),
        f"+ray_kwargs.ray_init.runtime_env.py_executable={quoted(fork_server)}",
    ]


def until(job: subprocess.Popen, log: Path, condition, *arguments) -> None:
    """Wait until a condition holds, while a job runs."""
    deadline = time.monotonic() + SECONDS
    while not condition(*arguments):
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def test_slurms_job_goes_on_after_its_time_limit(tmp_path, queue, words_of):
    """It is near after the first step, and nothing but that makes a checkpoint before the last step.

    The same command beside it, from another shell, is refused. That the job goes on as if it had never ended, bit for
    bit: the tests of `compare` and of ten ends below.
    """
    folder, submit = queue
    log, checkpoints = tmp_path / "job.log", tmp_path / "limited"
    overrides = ["scale=cpu_2nodes", *SETTINGS, "trainer.save_freq=100", *REPEATABLE]
    words = words_of("limited", *overrides)
    job = submit("--nodes=1", f"--output={log}", *words)
    until(job, log, (checkpoints / owner.OWNER_FILE).exists)
    environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(tmp_path), "PYTHON": sys.executable}
    beside = ["bash", RUN, *words[1:], "trainer.nnodes=1"]  # which slurm.sbatch adds
    second = subprocess.run(beside, env=environment, capture_output=True, text=True)
    assert second.returncode == 1
    assert f"another run is at work in {checkpoints}: process" in second.stderr, second.stderr
    until(job, log, lambda: any(read_metrics(file) for file in tmp_path.glob("quickstart/*.jsonl")))
    slurm.warn_job(folder)

    assert job.wait(SECONDS) == 0, log.read_text()[-3000:]
    text = log.read_text()
    assert text.count("+ exec python recipes/launch/watched_run.py") == 2, "one log of two starts"
    assert "verl_precision: the time limit is near. The job goes back to the queue" in text
    (step,) = set(re.findall(r"Resuming from \S+global_step_(\d+)", text))
    assert 1 <= int(step) < STEPS
    after = assert_one_series(tmp_path / "quickstart" / "limited.jsonl")
    assert not list(tmp_path.glob("quickstart/*.superseded")), "no step was done twice"
    assert after[-1]["precision/loss_scale"] == 2048

    actor = checkpoints / f"global_step_{STEPS}" / "actor"
    shape = shape_of(json.loads((actor / "huggingface" / "config.json").read_text()))
    size = sum(file.stat().st_size for file in actor.glob("*_rank_0.pt"))
    assert size == pytest.approx(12 * shape.parameters, rel=0.1)  # docs/scales.md; names weigh more in a tiny model


def killed_at(said: str, command: list[str]) -> None:
    """Run a command, and kill it when it says so; its driver lives on, without the workers, whose forks end, too."""
    with fork_server() as python:
        variables = {**os.environ, WORKER_PYTHON: python}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **pipes, text=True, env=variables) as process:
            for line in process.stdout:
                if said in line:
                    process.kill()
                    break


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files; Ray's sockets want a short name."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_sigterm_ends_everything_and_says_where_results_are(tmp_path, own_processes, hear_signals, temporary):
    process = subprocess.Popen(
        [*COMPARE, "--output", tmp_path],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    seen = ""
    for line in process.stdout:
        seen += line
        if "FSDP2 worker" in line:  # Ray, TransferQueue and a worker are up
            break
    assert len(own_processes()) > 3, seen
    both = signal.SIGTERM, signal.SIGINT  # of which one is heard; what comes together, Python hears by number
    for number in both:
        process.send_signal(number)
    rest, _ = process.communicate(timeout=90)
    assert process.returncode - 128 in both, seen + rest
    assert "every process of the run has ended" in rest and str(tmp_path) in rest.replace("\n", "")
    assert own_processes() == [] and not list(temporary.glob("vp-*"))


@pytest.mark.matrix
def test_compare_ended_at_ten_random_moments_leaves_nothing_and_goes_on(
    tmp_path, own_processes, hear_signals, temporary
):
    command = [*COMPARE, *SETTINGS, "--output", str(tmp_path)]
    former, random_moments = None, random.Random(int(os.environ.get("SEED", "48")))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT, signal.SIGKILL) * 2:
        with subprocess.Popen(command, preexec_fn=hear_signals) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random_moments.uniform(0, 150))
            process.send_signal(number)
        assert process.returncode in (0, -number, 128 + number)
        if signal.SIGKILL not in (former, number):
            assert own_processes() == [] and not list(temporary.glob("vp-*"))
        former = number
    subprocess.run(command, check=True)
    assert own_processes() == [] and not list(temporary.glob("vp-*"))
    assert any((folder / "summary.json").exists() for folder in (tmp_path / "quickstart").iterdir())


def test_compare_goes_on_when_the_command_itself_was_killed(tmp_path, own_processes, temporary):
    """Its run lives on without it, until the same command ends that and goes on from the last checkpoint.

    Step 3, which the first run has done after it, is done again: the same weights, bit for bit.
    """
    command = [*COMPARE, *SETTINGS, "trainer.save_freq=2", *REPEATABLE, "--output", str(tmp_path)]
    killed_at("step 3/", command)
    driver = next(process for process in own_processes() if "verl.trainer.main_ppo" in process.cmdline())
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "continues in" in again.stdout and not psutil.pid_exists(driver.pid) and not list(temporary.glob("vp-*"))
    (folder,) = (tmp_path / "quickstart").iterdir()
    rows = assert_one_series(folder / "fp16" / "metrics.jsonl")
    assert json.loads((folder / "summary.json").read_text())["runs"][0]["steps"] == len(rows)
    superseded = read_metrics(folder / "fp16" / "metrics.jsonl.superseded")
    assert [row["step"] for row in superseded] == [3] and differing(superseded, rows[2:3]) == [set()]
    assert superseded[0]["weight_sync/weights_digest"] != rows[1]["weight_sync/weights_digest"], "the weights change"
    assert "Resuming from" in (folder / "fp16" / "train-2.log").read_text()
    exports_in_fp16(folder / "fp16" / "checkpoints" / f"global_step_{STEPS}", tmp_path / "export")


def exports_in_fp16(checkpoint: Path, export: Path):
    """The saved model, exported: transformers and vLLM take it in FP16, and are as near to the trainer as FP16 is."""
    done = CliRunner().invoke(app, ["export", str(checkpoint), "--output", str(export)])
    assert done.exit_code == 0, done.output
    command = [sys.executable, Path(__file__).with_name("exported.py"), checkpoint, export]
    scored = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert scored.returncode == 0, scored.stderr[-3000:]
    found = json.loads(scored.stdout.splitlines()[-1])
    assert found["dtypes"] == ["torch.float32", "torch.float16", "torch.float16"]
    log_probs = {name: torch.tensor(values, dtype=torch.float64) for name, values in found["log_probs"].items()}
    # Three bits apart: 6 to 9 times here. How large each is, and single tokens' gap, depends on the CPU's kernels.
    gap = {name: (values - log_probs["trainer"]).abs().median() for name, values in log_probs.items()}
    assert gap["bf16"] > 3 * gap["transformers"] and gap["bf16"] > 3 * gap["vllm"], gap


@pytest.mark.matrix
def test_a_job_that_is_ended_ten_times_makes_progress_in_every_start(tmp_path, queue, words_of):
    """By SIGTERM, its time limit or kill -9, at random moments; no start has the six steps of two regular checkpoints.

    A start that is killed has made one of these, without which nothing could be left of it. The others are asked to
    save, after a step or two.
    """
    folder, submit = queue
    log, starts = tmp_path / "job.log", tmp_path / f"slurm-{JOB}-starts.log"
    tracker = tmp_path / "ended" / "latest_checkpointed_iteration.txt"
    ends = {
        "TERM": lambda: slurm.end_step(folder, "recipes/launch/watched_run.py"),
        "USR1": lambda: slurm.warn_job(folder),
        "KILL": lambda: slurm.kill_job(folder),
    }
    count, steps, chosen = 10, 60, random.Random(0)
    overrides = ["scale=cpu_2nodes", f"trainer.total_training_steps={steps}", "trainer.save_freq=3"]
    overrides += ["trainer.max_actor_ckpt_to_keep=2", *REPEATABLE, "actor_rollout_ref.rollout.n=2"]

    def saved() -> str:
        return tracker.read_text() if tracker.exists() else ""

    def trained() -> int:
        return len(re.findall(r"\bstep:\d+ - ", log.read_text()))

    job = submit("--nodes=1", f"--output={log}", *words_of("ended", *overrides))
    until(job, log, starts.exists)
    for number in range(count):
        last, done = saved(), trained()
        end, moment, after = chosen.choice(sorted(ends)), chosen.uniform(0, 2), chosen.randint(1, 2)
        if end == "KILL":
            until(job, log, lambda last=last: saved() not in ("", last))
        else:
            until(job, log, lambda least=done + after: trained() >= least)
        time.sleep(moment)
        ends[end]()
        until(job, log, lambda least=number + 2: len(starts.read_text().splitlines()) >= least)
    assert job.wait(2 * SECONDS) == 0, log.read_text()[-3000:]
    began = starts.read_text().splitlines()
    assert len(began) == len(set(began)) == count + 1, f"each began with a newer checkpoint: {began}"

    never = submit("--nodes=1", f"--output={tmp_path / 'never.log'}", *words_of("never_ended", *overrides))
    assert never.wait(2 * SECONDS) == 0
    one, other = (read_metrics(tmp_path / "quickstart" / f"{name}.jsonl") for name in ("never_ended", "ended"))
    assert [row["step"] for row in other] == list(range(1, steps + 1))
    assert len({row["weight_sync/weights_digest"] for row in one}) > steps // 2, "the weights change"
    assert differing(one, other) == [set()] * steps
