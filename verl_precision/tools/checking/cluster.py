"""`verl-precision check --cluster ADDRESS`: is every node of a Ray cluster ready for a run?

`compare_nodes` is pure: what each node said, against the driver and what the run needs. `look_at_nodes` asks them, one
Ray task a node, in the working directory and environment that verl's own workers will have there.
"""

import contextlib
import importlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.base.versions import installed_versions
from verl_precision.check.rules.files import named_files
from verl_precision.tools.checking.installation import PLUGIN, Finding

ANSWER_SECONDS = 300  # A node imports verl (and with it torch) for the first time, perhaps from a network file system.


@dataclass(frozen=True)
class Node:
    """What one node said."""

    name: str  # address, as Ray knows it
    gpus: float = 0  # what Ray counts there (with trainer.device=cpu a logical number)
    versions: dict[str, str] = field(default_factory=dict)  # installed distributions, and Python's
    plugin_loaded: bool = False  # whether `import verl` loaded this package's plugin in a worker there
    folder: str = ""  # working directory of a worker there
    # bytes of each file asked for; -1 for a folder, None for what is not there
    sizes: dict[str, int | None] = field(default_factory=dict)
    failure: str | None = None  # why the node could not answer; nothing else is known then


@dataclass(frozen=True)
class Needs:
    """What a run asks of a cluster."""

    nodes: int | None = None  # number of nodes with GPUs, or None for any
    gpus_per_node: int | None = None  # GPUs of each of them, or None for any number
    paths: tuple[str, ...] = ()  # files and folders that must be the same everywhere


def needs_of(config: DictConfig, paths: Sequence[str]) -> Needs:
    """Return what a composed recipe asks of a cluster, with more files and folders."""
    files = [name for _, name in named_files(config)]
    model = str(config.actor_rollout_ref.model.path)
    if Path(model).expanduser().is_dir():  # else a hub name
        files.append(model)
    wanted = dict.fromkeys(path for path in (*files, *paths) if not path.startswith("hdfs://"))
    return Needs(config.trainer.nnodes, config.trainer.n_gpus_per_node, tuple(wanted))


def compare_nodes(nodes: Sequence[Node], driver: Node, needs: Needs) -> Iterator[Finding]:
    """Compare each node with the driver, and the cluster with what the run needs.

    The first finding is the number of nodes; then, for each node, its answer, GPUs, versions, plugin and paths.
    """
    found, problem = sum(node.gpus > 0 for node in nodes), ""
    if needs.nodes is not None and found < needs.nodes:
        problem = f"{found} of trainer.nnodes={needs.nodes}; verl would wait. Start Ray on the others, or lower nnodes."
    yield Finding("nodes with GPUs", not problem, problem or str(found))
    for node in nodes:
        if node.failure is not None:
            remedy = "Install the same packages there, and restart its Ray."
            yield Finding(f"{node.name}: answer", False, f"{node.failure}. {remedy}")
            continue
        for what, problem, fine in _compared(node, driver, needs):
            yield Finding(f"{node.name}: {what}", not problem, problem or fine)


def _compared(node: Node, driver: Node, needs: Needs) -> Iterator[tuple[str, str, str]]:
    """Yield what was compared, what is wrong with it (or nothing), and what to say if nothing is."""
    wanted, problem = needs.gpus_per_node, ""
    if wanted is not None and 0 < node.gpus < wanted:  # a head without GPUs is usual, and harmless
        remedy = f"Free the others, start Ray with --num-gpus={wanted}, or lower n_gpus_per_node."
        problem = f"{node.gpus:g}, trainer.n_gpus_per_node={wanted}. {remedy}"
    yield "GPUs", problem, f"{node.gpus:g}"
    differing = [
        f"{name} {node.versions.get(name, 'missing')} (driver: {driver.versions.get(name, 'missing')})"
        for name in {**driver.versions, **node.versions}
        if node.versions.get(name) != driver.versions.get(name)
    ]
    problem = f"{'; '.join(differing)}. Install the driver's versions there, and restart its Ray." if differing else ""
    yield "versions", problem, ", ".join(f"{name} {version}" for name, version in driver.versions.items())
    problem = "`import verl` does not load it there. Run `verl-precision check` on that host."
    yield "plugin", "" if node.plugin_loaded else problem, "loaded by `import verl`"
    for path in needs.paths:
        here, there, problem = driver.sizes.get(path), node.sizes.get(path), ""
        if here is None:
            problem = "not on the driver either. Prepare it (the recipe's README), or correct the path."
        elif there is None:
            remedy = "Put it on a shared disk, and start Ray in one folder everywhere, or give an absolute path."
            problem = f"not there (from {node.folder}). {remedy}"
        elif here != there:
            problem = f"{there} bytes, {here} on the driver: another copy. Use the same file."
        yield path, problem, "a folder" if here == -1 else "the same size"


def look_at_nodes(address: str, paths: Sequence[str]) -> tuple[list[Node], Node]:
    """Return the answers of every node of the Ray cluster at host:port (or `auto`), and of this process.

    Raises:
        EnvironmentMismatchError: If there is no such cluster, or its Ray is another version.
    """
    import ray
    import ray.cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        try:
            if re.fullmatch(r"[\w.-]+:\d{1,5}", address):  # Ray itself tries for many minutes
                socket.create_connection(tuple(address.split(":")), timeout=10).close()  # type: ignore[arg-type]
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            problem, remedy = f"no Ray to talk to ({error})", "Start it: `ray start --head`."
            said = {"value": address, "allowed": "host:port of a running head, or auto on one of its hosts"}
            raise EnvironmentMismatchError(problem, setting="--cluster", **said, remedy=remedy) from error
    send_by_value(ray.cloudpickle)
    driver = Node("driver", **look_here(paths))
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    pending = []
    for node in alive:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(look_here).options(scheduling_strategy=strategy)
        pending.append((node, task.remote(paths)))
    return [_answer(node, reference) for node, reference in pending], driver


def _answer(node: dict[str, Any], reference: Any) -> Node:
    import ray

    name = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"  # two nodes may share an address: the name says which
    try:
        said = ray.get(reference, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError as error:  # whatever keeps a node from answering is the finding
        return Node(name, failure=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    return Node(name, gpus=node["Resources"].get("GPU", 0), **said)


def send_by_value(pickler: Any) -> None:
    """Have `look_here` travel with its code, so that it also runs on a node where this package is not installed."""
    for function in (look_here, installed_versions):
        pickler.register_pickle_by_value(sys.modules[function.__module__])


def look_here(paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `Node` that it knows itself, all but name, GPUs and failure."""
    versions = installed_versions()
    if "verl" in versions:
        with contextlib.suppress(SystemExit):  # of our plugin, whose words are on that host; here it is not loaded
            importlib.import_module("verl")
    sizes: dict[str, int | None] = {}
    for path in paths:
        real = os.path.expanduser(path)
        sizes[path] = (-1 if os.path.isdir(real) else os.path.getsize(real)) if os.path.exists(real) else None
    return {"versions": versions, "plugin_loaded": PLUGIN in sys.modules, "folder": os.getcwd(), "sizes": sizes}
