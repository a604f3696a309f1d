"""Rules of files, names, numbers, and settings that nothing reads; most of these rules are tables.

Also rules of the machine for a run on a CPU. The tables are those of verl 0.9.1 and vLLM 0.28.0.
"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.files import table_of
from verl_precision.base.verl_config import ACTOR, CORRECTION, LOSS, ROLLOUT, SEEDED, is_repeatable
from verl_precision.base.versions import require_tested
from verl_precision.check.rules.gpu_memory import GIB
from verl_precision.check.rules.rule import Environment, Fault, Machine, faults_raised_by, rule
from verl_precision.integration.trainer.saving import saves
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

DATA = ("data.train_files", "data.val_files")
REWARD = "reward.custom_reward_function"
# Rewards of this package that are only right or wrong.
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
_KNOWN = table_of(__file__)
COUNTS, COMPUTED_WITH = _KNOWN["counts"], _KNOWN["computed_with"]
# Numbers whose default is null, which does not show their type.
NUMBERS_OR_NULL = ("trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", "data.gen_batch_size")
KL = "kl k1 abs mse k2 low_var_kl k3 kl+ k1+ abs+ mse+ k2+ low_var_kl+ k3+"
REJECTIONS = " ".join(f"token_k{n} seq_sum_k{n} seq_mean_k{n}" for n in "123") + " seq_max_k2 seq_max_k3"
# `ModelDType` of vllm/config/model.py (compared by tests/check/rules/test_planted_edits.py).
VLLM_DTYPES = "auto half float16 bfloat16 float float32"
# Names that verl or vLLM looks up in a worker: the known names, and the setting and value with which the name is read.
NAMES = {
    f"{ROLLOUT}.dtype": (VLLM_DTYPES, f"{ROLLOUT}.name", "vllm"),
    f"{ACTOR}.kl_loss_type": (KL, f"{ACTOR}.use_kl_loss", True),
    "algorithm.kl_penalty": (KL, "algorithm.use_kl_in_reward", True),
    f"{ACTOR}.checkpoint.save_contents": ("model optimizer extra hf_model", "", None),
    f"{CORRECTION}.rollout_is": (" ".join(("token", "sequence", *WEIGHT_KINDS)), "", None),
    f"{CORRECTION}.rollout_rs": (REJECTIONS, "", None),
}


DYNAMIC, CLIP_C = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.clip_ratio_c"
_ONE_CLIP = (*POLICY_LOSSES, *_KNOWN["one_clip"])
IGNORED = ({"setting": CLIP_C, "default": 3.0, "decider": LOSS, "values": _ONE_CLIP}, *_KNOWN["ignored"])


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
    """Data files and the reward function exist. Only the first missing file is reported."""
    for setting, name in named_files(config):
        if name in machine.missing_files:
            yield Fault.worded("files-missing", setting, value=name, folder=machine.folder)
            return


@rule("one-checkpoint", "warning")
def one_checkpoint(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl removes the former checkpoint before all of the new one is written."""
    setting = "trainer.max_actor_ckpt_to_keep"
    if saves(config) and OmegaConf.select(config, setting) == 1:
        yield Fault.worded("one-checkpoint", setting)


@rule("vllm-cpu-untested", of_machine=True)
def tested_vllm_cpu(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """A CPU run needs a tested vllm-cpu."""
    if config.trainer.device == "cpu" and machine.vllm_cpu is not None:
        yield from faults_raised_by(require_tested, "vllm-cpu", machine.vllm_cpu)
    elif config.trainer.device == "cpu":
        yield Fault.worded("vllm-cpu-untested/not installed", DEVICE)


@rule("host-memory-too-small", of_machine=True)
def host_memory(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """The processes of a CPU run fit into memory, weights and messages into /dev/shm; if it is full: SIGBUS."""
    if config.trainer.device != "cpu":
        return
    if machine.memory < MIN_CPU_MEMORY:
        least, free = MIN_CPU_MEMORY // GIB, machine.memory / GIB
        yield Fault.worded("host-memory-too-small", DEVICE, least=least, free=free)
    if machine.shared_memory < MIN_SHARED_MEMORY:
        least, free = MIN_SHARED_MEMORY >> 20, machine.shared_memory >> 20
        yield Fault.worded("host-memory-too-small/shared", DEVICE, least=least, free=free)


@rule("ray-resources-too-few")
def ray_resources(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's actors need logical CPUs of the Ray that the run starts; with too few, verl waits forever."""
    ray_init, trainer = config.ray_kwargs.ray_init, config.trainer
    # on an existing cluster the run does not set the resources
    if trainer.device != "cpu" or ray_init.get("address", environment.ray_address) not in (None, "local"):
        return
    workers = trainer.n_gpus_per_node * trainer.nnodes
    needed = CPUS_FIXED + config.transfer_queue.backend.SimpleStorage.num_data_storage_units + CPUS_PER_WORKER * workers
    cpus = ray_init.num_cpus if ray_init.num_cpus is not None else environment.cores
    if cpus is not None and cpus < needed:
        yield Fault.worded("ray-resources-too-few", "ray_kwargs.ray_init.num_cpus", value=cpus, needed=needed)


def null_number(config: DictConfig) -> str | None:
    """Return the first setting that is null where verl, rules and resolvers compute with it; called before them."""
    asked = [*COUNTS, *COMPUTED_WITH]  # first those from which others are computed
    if OmegaConf.select(config, DYNAMIC):
        asked.append(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if OmegaConf.select(config, "reward.reward_model.enable"):
        asked.append("reward.reward_model.model_path")
    return next((setting for setting in asked if OmegaConf.select(config, setting, default=0) is None), None)


@rule("value-out-of-range")
def counts_below_one(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Numbers without which verl fails once everything is loaded."""
    for setting in COUNTS:
        value = OmegaConf.select(config, setting, default=1)  # absent: another engine's
        if setting == "data.train_batch_size" and "async_training" in config:  # that trainer has no batches of prompts
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Fault(setting, "verl needs at least one", "a whole number >= 1", f"Set {setting} to such a number.")


@rule("name-unknown")
def unknown_names(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Names that are looked up in a worker only."""
    for setting, (known, when, value) in NAMES.items():
        given = ",".join(str(name) for name in names_in(config, setting) if name).replace(" ", "").split(",")
        wrong = ", ".join(name for name in given if name not in ("", *known.split()))
        if wrong and (not when or OmegaConf.select(config, when) == value):
            yield Fault.worded("name-unknown", setting, wrong=wrong, known=", ".join(known.split()))


@rule("setting-ignored", "warning")
def ignored_settings(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Settings that were changed from verl's default where nothing reads them."""
    for row in IGNORED:
        value, decides = (OmegaConf.select(config, row[key]) for key in ("setting", "decider"))
        if value not in (None, row["default"]) and decides in row["values"]:
            instead = f"; {row['instead']} counts" if "instead" in row else ""
            yield Fault.worded("setting-ignored", row["setting"], row=row, decides=decides, instead=instead)


@rule("not-repeatable")
def not_repeatable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A run that seeds each request is meant to repeat: everything else that chance decides must be fixed too."""
    if not is_repeatable(config):
        return
    sampler = "trainer.v1.sampler.custom_sampler.name"
    needed: list[tuple[str, object, str]] = [
        (f"{ROLLOUT}.max_num_seqs", 1, "the logits of a sequence are rounded differently in another batch"),
        (f"{ROLLOUT}.enable_prefix_caching", False, "a prompt may be computed in parts"),
        ("mismatch.enabled", True, "verl's own trainer gives prompts random names"),
        (sampler, "SortedReplayBuffer", "a batch has the order in which responses arrive"),
    ]
    if OmegaConf.select(config, "trainer.v1.trainer_mode") != "sync":
        needed.append(("trainer.v1.trainer_mode", "vp_sync", "a response's weights depend on the machine's speed"))
    if config.data.shuffle and config.data.seed is None:
        needed.append(("data.seed", 0, "prompts are shuffled at random"))
    for setting, value, differs in needed:
        if OmegaConf.select(config, setting) != value:
            problem = f"{SEEDED}=True asks for a run that repeats bit for bit, but {differs}"
            yield Fault(setting, problem, str(value))
