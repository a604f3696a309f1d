"""Logs as Ray, vLLM, torch, NCCL, Hydra, Slurm and Kubernetes write them: the report names the cause of each.

The forms are those of public threads; words, names and addresses are made up.
"""

import signal
from pathlib import Path

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.tools.runs import failure_report
from verl_precision.tools.runs.failure_report import LINES, reason, relevant_lines

HEAD, FRAME = "Traceback (most recent call last):", '  File "x.py", line 7, in load'
DIED = """ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: cf53
\tpid: 11
\tname: WorkerDict_0:0
\tnamespace: 10ce
\tip: 192.0.2.7
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) SIGSEGV."""
W = "(WorkerDict pid=11) "


def said(prefix: str, *lines: str) -> str:
    return "\n".join(prefix + line for line in "\n".join(lines).split("\n"))


def raised(message: str) -> str:
    """Return a traceback, and what Ray makes of it in another process."""
    heard = f"ray.exceptions.RayTaskError({message.partition(':')[0]}): ray::WorkerDict.init() (pid=11)"
    return said(W, HEAD, f"{FRAME}\n    raise found", message) + f"\n(TaskRunner pid=10) {heard}"


ASSERT = "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed."
FLOOD = "\n".join(f"ERROR:2026-11-21 19:12:39,416:Error in _run_prompt for uid={i:x}a{i}" for i in range(900))
THREADS = "\n".join(f"{W}/pytorch/T.cu:112: f: block: [0,0,0], thread: [{i},0,0] {ASSERT}" for i in range(500))
CAUSES = [  # the log before an actor's death is heard of, and what the first line of the report says
    *((case["log"], case["cause"]) for case in cases(__file__, "causes")),
    (f"{THREADS}\n{raised('torch.AcceleratorError: CUDA error: device-side assert')}", ASSERT),
    (f"{FLOOD}\n{raised('ValueError: so it is')}", "so it is"),
]


@pytest.mark.parametrize(("log", "cause"), CAUSES, ids=[cause for _, cause in CAUSES])
def test_the_cause_is_named_first(log, cause):
    report = relevant_lines(f"{log}\n\n{DIED}".split("\n"))
    assert cause in report[0] and len(report) <= LINES and "raise found" not in "\n".join(report)


def test_of_a_huge_log_the_end_is_read_and_of_a_line_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_report, "_LOG_BYTES", 10_000)
    log = tmp_path / "log"
    log.write_bytes(b"ValueError: long ago\n" + b"x" * 50_000 + b"\n\xff\n\x1b[2J\x00ValueError: now\r\n" + b"y" * 5000)
    assert reason(log, 1) == "  ValueError: now"
    log.write_bytes(b"z" * 50_000)
    assert len(reason(log, 1)) < 2000


BEGINNINGS = st.sampled_from([line for log, _ in CAUSES for line in log.split("\n")[:9]])


@given(st.lists(st.text() | BEGINNINGS, max_size=40))
def test_any_lines_make_at_most_ten(lines):
    report = relevant_lines(lines)
    assert len(report) <= LINES and not any("\x1b" in line for line in report)


BUFFER = "Sync replay buffer selected terminal groups with no materializable trajectories"


@pytest.mark.parametrize(("name", "cause", "remedy"), cases(__file__, "recorded"))
def test_cause_comes_first_and_once(name, cause, remedy):
    report = relevant_lines((Path(__file__).parent / "recorded" / f"{name}.log").read_text().splitlines())
    assert [number for number, line in enumerate(report) if cause in line] == [0]
    assert len(report) <= 10 and len(set(report)) == len(report)
    remedies = [line for line in report[1:] if line.startswith("remedy: ")]
    assert remedies == report[1 : 1 + (remedy is not None)]
    assert remedy is None or remedy in remedies[0]
    # No engine that nobody installed, and no prefix.
    for word in ("torchtitan", "veomni", "megatron", "automodel", "Warning", "pid=", "multiproc_executor.py", "raise "):
        assert word not in "\n".join(report)
    if name in ("head_size", "newline"):  # verl's own last words come last
        assert BUFFER in report[-1] and BUFFER not in report[0]


PREFLIGHT = "verl_precision: ray_kwargs.ray_init.num_cpus=2: verl's actors ask Ray for 7 logical CPUs"
OURS = "verl_precision.base.errors.LossScaleError: gradients stay non-finite"
BOOM = [
    "\x1b[36m(W pid=2, ip=192.0.2.1)\x1b[0m (Worker_TP0 pid=3) ERROR 11-21 19:02:22 [a.py:1] ValueError: boom",
    "\x1b[36m(W pid=5)\x1b[0m ValueError: boom\x1b[32m [repeated 3x across cluster]\x1b[0m",
    "RuntimeError: Worker failed with error 'boom', please check the stack trace above for the root cause",
]
HYDRA = ["Could not override 'actor.foo'.", "To append to your config use +actor.foo=1", "    full_key: actor.foo"]
HYDRA += ["Set the environment variable HYDRA_FULL_ERROR=1"]
DURING = "\nDuring handling of the above exception, another exception occurred:\n"
CHAINED = said("", HEAD, FRAME, "KeyError: 'qwen9'", DURING, HEAD, FRAME, "ValueError: no such model type")
NOT_THERE = "x.py:1: UserWarning: veomni engine is not available: ModuleNotFoundError('veomni')"


@pytest.mark.parametrize(("lines", "report"), [
    # Ours comes before an earlier one.
    (["ValueError: first", OURS, "KeyError: 'x'"], [OURS, "then: ValueError: first", "then: KeyError: 'x'"]),
    (["start", PREFLIGHT, PREFLIGHT], [PREFLIGHT]),
    (CHAINED.split("\n"), ["KeyError: 'qwen9' | at x.py:7 in load", "then: ValueError: no such model type"]),
    (BOOM, ["ValueError: boom (in W, Worker_TP0)"]),
    # Without any error it is the end of the log.
    (["a", NOT_THERE, "", "b"], ["a", "b"]),
    ([*HYDRA, ""], HYDRA),
    ([], []),
])  # fmt: skip
def test_report_by_hand(lines, report):
    assert relevant_lines(lines) == report


def test_a_process_ended_by_a_signal(tmp_path):
    (tmp_path / "log").write_text("working\n")
    text = reason(tmp_path / "log", -signal.SIGBUS)
    assert text.splitlines()[0] == "  ended by SIGBUS" and "--shm-size" in text
