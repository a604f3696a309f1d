"""How the two processes begin: arguments, environment, and an end with their parent."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verl_precision.offline.plan import Work, missing
from verl_precision.offline.store import Store


@dataclass(frozen=True)
class Task:
    """What a process does.

    Attributes:
        store: the analysis.
        dtype: of the engine.
        shards: (rollout dtype, shard) of each file to write.
        on_gpu: whether there is a CUDA device.
    """

    store: Store
    dtype: str
    shards: tuple[tuple[str, int], ...]
    on_gpu: bool


def entry(kind: str, run: Callable[[Task], None]) -> None:
    """Read the command line and do what is still missing of it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder, dtype, *names = sys.argv[1:]
    store = Store.open(Path(folder))
    pairs = tuple((rollout, int(shard)) for rollout, shard in (name.split("/") for name in names))
    work = missing(store, Work(kind, dtype, pairs))
    if work is None:
        return
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's default is half of the memory
    # vLLM in this process: nothing of it outlives us.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    run(Task(store, dtype, work.shards, on_gpu))


def _end_with_parent() -> None:
    """The parent holds our standard input open; its end, however it came, is ours: nobody samples twice."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def arguments(kind: str, folder: Path, dtype: str, shards: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the command of a process."""
    names = [f"{rollout}/{shard}" for rollout, shard in shards]
    return [sys.executable, "-m", f"verl_precision.offline.{kind}", str(folder), dtype, *names]
