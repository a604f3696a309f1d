"""Interpreters without verl, for tests of what happens when it is imported: forked, with its own imports already there.

`import verl` takes six seconds of a core; five of them are torch, transformers, Ray and tensordict. One process of
a session imports those, and nothing of verl, vLLM or ours; `tools/runs/fork_server` has the forks.
"""

import os
import shlex
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

from verl_precision.tools.runs.fork_server import fork_server

PRELOADED = ("torch", "torch.distributed.fsdp", "tensordict", "transformers", "ray")
SERVER = "VERL_PRECISION_TEST_PYTHON"
KEPT = (
    *("PATH", "HOME", "PYTHONPATH", "XDG_CACHE_HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH"),
    *("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "VERL_PRECISION_CACHE", "CUDA_VISIBLE_DEVICES"),
)
IDLE_SECONDS = 600.0  # longer than the pause between two tests that want a fork


def offer() -> Callable[[], object]:
    """Offer the server to this process and its children; return what ends it. The first fork starts its template."""
    server = fork_server(PRELOADED, IDLE_SECONDS)
    os.environ[SERVER] = server.__enter__()
    return lambda: server.__exit__(None, None, None)


def start(script: str, folder: Path, log: IO | int, **variables: str) -> subprocess.Popen:
    """Start a script in a fork, in a folder; `variables` are set before its first line, and `log` gets what it says."""
    path = folder / f"script_{uuid.uuid4().hex}.py"
    path.write_text(f"import os\nos.environ |= {variables!r}\n{script}")
    errors = subprocess.PIPE if log == subprocess.PIPE else subprocess.STDOUT
    command = [*shlex.split(os.environ[SERVER]), str(path)]
    # One and the same environment, or each fork would have a template of its own.
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    return subprocess.Popen(command, stdout=log, stderr=errors, cwd=folder, env=environment, text=True)


def ranks(world: int, script: Callable[[int], str], folder: Path, **variables: str) -> None:
    """Run a script in each of some ranks at once; assert that all end well."""
    logs, processes = [folder / f"log_{rank}.txt" for rank in range(world)], []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(start(script(rank), folder, output, RANK=str(rank), WORLD_SIZE=str(world), **variables))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-6000:] for log in logs)


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a script in a fork, as `start`; return what came of it."""
    with start(script, folder, subprocess.PIPE, **variables) as process:
        try:
            output, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
