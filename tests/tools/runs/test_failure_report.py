"""A failed run says its cause first, once, in at most ten lines. The logs are of real runs, cut; recorded/README.md."""

import signal
from pathlib import Path

import pytest

from verl_precision.tools.runs.failure_report import reason, relevant_lines

RECORDED = Path(__file__).parent / "recorded"
# Log, the words its cause has to have, the words of the remedy.
CAUSES = {
    "weight_sync": ("WeightSyncError: Weight sync 0 did not take: lm_head", None),
    "head_size": ("Unsupported CPU attention configuration: head_dim=16", "another head_dim"),
    "newline": ("Expected Qwen newline to tokenize to one token, got []", "a token for the newline"),
    "killed_worker": ("died unexpectedly (exit code: -9)", "memory"),
    "sigbus": ("SIGBUS", "--shm-size"),
}
BUFFER = "Sync replay buffer selected terminal groups with no materializable trajectories"


@pytest.mark.parametrize("name", CAUSES)
def test_cause_comes_first_and_once(name):
    cause, remedy = CAUSES[name]
    report = relevant_lines((RECORDED / f"{name}.log").read_text().splitlines())
    assert cause in report[0]
    assert sum(cause in line for line in report) == 1
    assert len(report) <= 10 and len(set(report)) == len(report)
    remedies = [line for line in report[1:] if line.startswith("remedy: ")]
    assert remedies == report[1 : 1 + (remedy is not None)]
    assert remedy is None or remedy in remedies[0]
    # No engine that nobody installed, and no prefix.
    for word in ("torchtitan", "veomni", "megatron", "automodel", "Warning", "pid=", "multiproc_executor.py", "raise "):
        assert word not in "\n".join(report)
    if name in ("head_size", "newline"):  # verl's own last words come last
        assert BUFFER in report[-1] and BUFFER not in report[0]


def test_ours_comes_before_what_was_earlier():
    lines = [
        "ValueError: first",
        "verl_precision.base.errors.LossScaleError: gradients stay non-finite",
        "KeyError: 'x'",
    ]
    assert relevant_lines(lines) == [
        "verl_precision.base.errors.LossScaleError: gradients stay non-finite",
        "then: ValueError: first",
        "then: KeyError: 'x'",
    ]


def test_preflight_and_repetitions():
    preflight = "verl_precision: ray_kwargs.ray_init.num_cpus=2: verl's actors ask Ray for 7 logical CPUs"
    assert relevant_lines(["start", preflight, preflight]) == [preflight]
    lines = [
        "\x1b[36m(W pid=2, ip=192.0.2.1)\x1b[0m (Worker_TP0 pid=3) ERROR 11-21 19:02:22 [a.py:1] ValueError: boom",
        "\x1b[36m(W pid=5)\x1b[0m ValueError: boom\x1b[32m [repeated 3x across cluster]\x1b[0m",
        "RuntimeError: Worker failed with error 'boom', please check the stack trace above for the root cause",
    ]
    assert relevant_lines(lines) == ["ValueError: boom (in W, Worker_TP0)"]


def test_a_process_ended_by_a_signal(tmp_path):
    (tmp_path / "log").write_text("working\n")
    text = reason(tmp_path / "log", -signal.SIGBUS)
    assert text.splitlines()[0] == "  ended by SIGBUS" and "--shm-size" in text


def test_an_echo_is_better_than_nothing():
    assert relevant_lines(["EngineDeadError: EngineCore encountered an issue."])[0].startswith("EngineDeadError")


def test_many_errors_make_ten_lines_and_the_last_is_kept():
    report = relevant_lines([f"ValueError: {i}" for i in range(100)])
    assert len(report) == 10 and report[0] == "ValueError: 0" and report[-1] == "then: ValueError: 99"


def test_a_log_without_any_error_shows_its_end():
    lines = ["a", "x.py:1: UserWarning: veomni engine is not available: ModuleNotFoundError('veomni')", "", "b"]
    assert relevant_lines(lines) == ["a", "b"]
    assert relevant_lines([]) == []
