"""Logs as Ray, vLLM, torch, NCCL, Hydra, Slurm and Kubernetes write them: the report names the cause of each.

The forms are those of public threads; words, names and addresses are made up.
"""

import signal
from pathlib import Path

import pytest
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
W, SERVER = "(WorkerDict pid=11) ", "(Server pid=3) "
CORE = f"{SERVER}(EngineCore pid=4) ERROR 11-21 19:02:22 [core.py:7] "


def said(prefix: str, *lines: str) -> str:
    return "\n".join(prefix + line for line in "\n".join(lines).split("\n"))


def raised(*message: str, by: str = W, frame: str = f"{FRAME}\n    raise found") -> str:
    """Return a traceback, and what Ray makes of it in another process."""
    heard = f"ray.exceptions.RayTaskError({message[0].partition(':')[0]}): ray::WorkerDict.init() (pid=11)"
    return said(by, HEAD, frame, *message) + f"\n(TaskRunner pid=10) {heard}"


WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=BROADCAST) ran for 600021 ms."
ASSERT = "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed."
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "loop.py", line 5, in run
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "tool.py", line 12, in call
    |     raise ToolFailed("no such tool: search")
    | tools.ToolFailed: no such tool: search
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "tool.py", line 30, in wait
    | asyncio.exceptions.CancelledError
    +------------------------------------"""
TORCHRUN = said("", HEAD, FRAME, "torch.multiprocessing.errors.ChildFailedError: ", "=====", "train.py FAILED", "-----")
DIRECT = "\nThe above exception was the direct cause of the following exception:\n"
WARNED = said("WARNING 11-21 19:02:22 [a.py:1] ", HEAD, "ImportError: no flash")
FLOOD = "\n".join(f"ERROR:2026-11-21 19:12:39,416:Error in _run_prompt for uid={i:x}a{i}" for i in range(900))
THREADS = "\n".join(f"{W}/pytorch/T.cu:112: f: block: [0,0,0], thread: [{i},0,0] {ASSERT}" for i in range(500))
AT_A_TIME = f'(W pid=1) {HEAD}\n(W pid=2) {HEAD}\n(W pid=1) {FRAME}\n(W pid=2)   File "b.py", line 2, in g'
AT_A_TIME += "\n(W pid=2) queue.Full\n(W pid=1) data.Halt: one"
VALIDATION = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
NCCL = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1691, unhandled system error"
NCCL_KIND = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
CAUSES = [  # the log before an actor's death is heard of, and what the first line of the report says
    (raised("Exception: data did not match any variant of untagged enum"), "untagged enum"),
    (raised("torch._dynamo.exc.Unsupported: Data dependent operator"), "Unsupported: Data"),
    (raised("_queue.Empty"), "_queue.Empty | at x.py:7 in load (in WorkerDict)"),
    (raised("StopIteration"), "StopIteration | at x.py:7"),
    (raised("reward.make.<locals>.Refused: the judge said no"), "the judge said no"),
    (raised("KeyError: 'ground_truth'"), "KeyError: 'ground_truth' | at x.py:7 in load"),
    (raised("AssertionError", frame=f"{FRAME}\n    assert k == 2\n           ^^^^^^"), "x.py:7 in load: assert k == 2"),
    (GROUP, "tools.ToolFailed: no such tool: search"),
    (said("(W pid=1) ", GROUP), "no such tool: search (in W)"),
    ("  | ExceptionGroup: some (1 sub-exception)\n    | ValueError: max_tokens is -7.", "max_tokens is -7"),
    (f"{W}[rank3]:[E ProcessGroupNCCL.cpp:683] [Rank 3] {WATCHDOG}", WATCHDOG),
    (f"[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] {WATCHDOG}", WATCHDOG),
    (f"Epoch 0:   6%|# | 3/50 [6:28, loss=2][E ProcessGroupNCCL.cpp:458] {WATCHDOG}", WATCHDOG),
    ("n1:1:2 [0] NCCL WARN Connect to 192.0.2.1<5> failed : No route to host", "No route to host"),
    (raised(NCCL, NCCL_KIND, "Last error:", "socketStartConnect: Connect to 192.0.2.9 failed"), "socketStartConnect"),
    (said(W, "terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: x"), "error: x"),
    (f"{W}'\n{W}  what():  [PG ID 0 Rank 3] {WATCHDOG}", WATCHDOG),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "oom_kill"),
    ("srun: error: node2: task 1: Out Of Memory", "Out Of Memory"),
    (said("", HEAD, FRAME, "KeyboardInterrupt", "slurmstepd: error: *** CANCELLED AT 1 DUE TO TIME LIMIT"), "TIME L"),
    ("command terminated with exit code 137", "exit code 137"),
    ("The node was low on resource: ephemeral-storage.", "ephemeral-storage"),
    ("[12345.6] Out of memory: Killed process 77 (ray::WorkerDict)", "Killed process 77"),
    ("(raylet) [2025-04-02 15:02:00,117 E 13 13] (raylet) n.cc:3: 1 killed due to memory pressure", "1 killed"),
    (raised(VALIDATION, "  Value error, max_model_len (32768) is greater", by=SERVER), "max_model_len (32768)"),
    (raised("omegaconf.errors.ConfigKeyError: Key 'foo'", "    full_key: a.foo", "    object_type=dict"), "key: a.foo"),
    (raised("hydra.errors.InstantiationException: Error locating target 'x'", "full_key: a.b"), "full_key: a.b"),
    (f"{THREADS}\n{raised('torch.AcceleratorError: CUDA error: device-side assert')}", ASSERT),
    (f"E0325 20:57:27.62 26 torch/api.py:869] failed (exitcode: -9) local_rank: 5\n{TORCHRUN}", "exitcode: -9"),
    (f"ERROR:torch.distributed.api:failed (exitcode: -9) local_rank: 3\n{TORCHRUN}", "exitcode: -9"),
    (said("[rank1]: ", HEAD, FRAME, "data.Halt: the data ended"), "data.Halt: the data ended"),
    ("\n".join(f"2025-07-03T14:20:51.{i}Z {x}" for i, x in enumerate((HEAD, FRAME, "x.Key: it", "  at: a.b"))), "a.b"),
    (said("[2025-05-10 00:18:27] ", HEAD, FRAME, "data.Halt: ended"), "data.Halt: ended"),
    (AT_A_TIME, "queue.Full | at b.py:2 in g"),
    (said(CORE, "EngineCore failed to start.", HEAD, FRAME, "ValueError: No memory for the cache."), "No memory"),
    (f"{SERVER}{HEAD}\n{SERVER}RuntimeError: Engine core initialization failed. See root cause above.", "failed"),
    (said(SERVER, "ERROR:    [Errno 98] error while attempting to bind", HEAD, "SystemExit: 1"), "attempting to bind"),
    (raised("RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error."), "Bus error"),
    (f"{W}!!!!!!! Segfault encountered !!!!!!!", "Segfault encountered"),
    (said("", HEAD, FRAME, "socket.gaierror: Temporary failure", DIRECT, raised("OSError: We couldn't")), "gaierror"),
    (raised("OSError: [Errno 28] No space left on device: '/c'"), "No space left on device"),
    ("usage: x [-h]\nx.py: error: unrecognized arguments: --foo", "--foo"),
    (f"2026-11-21 04:07:31.150 | ERROR    | x:f:12 - no\n{HEAD}\n\n{FRAME}\n    └ 1\n\ndata.Halt: it", "data.Halt: it"),
    (raised("RuntimeError: Caught KeyError in DataLoader worker 0.", f"Original {HEAD}", "KeyError: 7"), "Error: 7"),
    (said("", HEAD, "x.ProcessRaisedException: ", "", "-- It ended", HEAD, FRAME, "ValueError: it"), "Error: it"),
    (said("", "x.RemoteTraceback:", '"""', HEAD, FRAME, "ValueError: so", '"""', DIRECT, HEAD, "x.Halt"), "Error: so"),
    (raised("Exception: WorkerProc initialization failed. See stack trace for root cause."), "initialization failed"),
    (f"/tmp/m.c:5:10: fatal error: Python.h lost\n{raised('subprocess.CalledProcessError: gcc 1')}", "Python.h"),
    (f"{W}free(): invalid pointer", "invalid pointer"),
    ("double free or corruption (!prev)", "double free"),
    ("*** stack smashing detected ***: terminated", "smashing"),
    ("thread 'tokio-runtime-worker' panicked at src/lib.rs:3:5:", "panicked at src/lib.rs"),
    ("[2025-04-02 15:02:00,117 C 13 13] (raylet) m.cc:3:  Check failed: x == y", "Check failed"),
    ("(raylet) The node with node id: ab has been marked dead because of missed heartbeats", "marked dead"),
    ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 137.", "MEMLIMIT"),
    ("Memory access fault by GPU node-3 on address 0x7. Reason: Unknown.", "access fault"),
    ("[ERROR] 2026-01-01-10:00:00 (PID:7, Device:0) ERR02200 DIST call hccl api failed.", "hccl"),
    ('{"level": "error", "msg": "the tool server is gone"}', "tool server"),
    (f"Training: 1%|# | 1/9 [01:13<03:41, 7.8s/it]{raised('data.Halt: the data ended')}", "the data ended"),
    (said(W, "╭─ Traceback (most recent call last) ─╮", *30 * ["│ a.py:3 in f │"], "╰──╯", "Halt: it"), "Halt: it"),
    ("ray.exceptions.RayActorError: The actor died.\n" + raised("data.Halt: it ended"), "it ended"),
    ("run.sh: line 5: 77 Killed                  python -m verl", "Killed"),
    ("srun: error: n1: Exited with exit code 1\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 1 ***", "JOB 7"),
    # Others' errors that came first.
    (said("", "Exception ignored in: f", HEAD, FRAME, "OSError: x", raised("ValueError: so it is")), "so it is"),
    (f"{WARNED}\n{raised('ValueError: so it is')}", "so it is"),
    (f"{FLOOD}\n{raised('ValueError: so it is')}", "so it is"),
]  # fmt: skip


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


@pytest.mark.parametrize(("name", "cause", "remedy"), [
    ("weight_sync", "WeightSyncError: Weight sync 0 did not take: lm_head", None),
    ("head_size", "Unsupported CPU attention configuration: head_dim=16", "another head_dim"),
    ("newline", "Expected Qwen newline to tokenize to one token, got []", "a token for the newline"),
    ("killed_worker", "died unexpectedly (exit code: -9)", "memory"),
    ("sigbus", "SIGBUS", "--shm-size"),
])  # fmt: skip
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
