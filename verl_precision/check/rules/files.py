"""Rules of what a config names on the machine at hand: data, the reward function, folders, packages."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.rules.rule import Fault, Machine, rule
from verl_precision.integration.trainer.saving import saves

DATA = ("data.train_files", "data.val_files")
REWARD = "reward.custom_reward_function"
# Rewards of this package, which ask math-verify, and one that asks reasoning-gym.
OURS = "pkg://verl_precision.tools.rewards"
ANSWER_REWARDS = (f"{OURS}.boxed_answer", f"{OURS}.answer_tag")
REWARD_PACKAGES = {**dict.fromkeys(ANSWER_REWARDS, "math_verify"), f"{OURS}.reasoning_gym_answer": "reasoning_gym"}
# Packages of verl's loggers that have one (verl.utils.tracking).
LOGGER_PACKAGES = {name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")}
LOGGER_PACKAGES |= {"tracking": "wandb", "vemlp_wandb": "volcengine_ml_platform"}
ENGINE_PACKAGES = {"sglang": "sglang", "trtllm": "tensorrt_llm"}  # of rollouts; vLLM's own rules ask for its version
PIP = {"math_verify": '"math-verify[antlr4_9_3]"'}  # the antlr4 that Hydra has
CODE = ("data.custom_cls.path", "actor_rollout_ref.rollout.agent.agent_loop_config_path", f"{REWARD}.path")


def is_verls_dataset(config: DictConfig) -> bool:
    """Return whether verl's own class reads the data; one of the user's own may take any names, columns and rows."""
    return OmegaConf.select(config, "data.custom_cls.path") is None


def names_in(config: DictConfig, setting: str) -> list:
    """Return the names that a setting holds: one, or a list of them."""
    value = OmegaConf.select(config, setting)
    return list(value) if OmegaConf.is_list(value) else [value]


def named_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield setting and name of each file of data and of code that a config looks for on the disk."""
    for setting in (*(DATA if is_verls_dataset(config) else ()), *CODE):
        for name in names_in(config, setting):
            if name is not None and not str(name).startswith(("hdfs://", "pkg://")):
                yield setting, str(name)


def needed_packages(config: DictConfig) -> list[tuple[str, str, str]]:
    """Return setting, name and package of each logger, engine, optimizer and reward that needs one."""
    model = config.actor_rollout_ref
    rollout, reward = str(model.rollout.name), str(OmegaConf.select(config, f"{REWARD}.path"))
    optimizer = str(model.actor.optim.get("optimizer_impl", "torch"))
    loggers = map(str, names_in(config, "trainer.logger"))
    named = [
        *(("trainer.logger", name, LOGGER_PACKAGES.get(name)) for name in loggers),
        ("actor_rollout_ref.rollout.name", rollout, ENGINE_PACKAGES.get(rollout)),
        ("actor_rollout_ref.model.use_liger", "True", "liger_kernel" if model.model.get("use_liger") else None),
        (f"{REWARD}.path", reward, REWARD_PACKAGES.get(reward)),
        ("actor_rollout_ref.actor.optim.optimizer_impl", optimizer, optimizer.partition(".")[0]),
    ]
    return [(setting, name, package) for setting, name, package in named if package]


def written_folders(config: DictConfig) -> list[tuple[str, str]]:
    """Return setting and path of each folder that a run writes to."""
    settings = ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    if saves(config):
        settings.append("trainer.default_local_dir")
    found = [(setting, OmegaConf.select(config, setting)) for setting in settings]
    return [(setting, str(path)) for setting, path in found if path is not None]


@rule("files-missing", of_machine=True)
def missing_files(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """Data files and the reward function are there. One missing file is enough."""
    for setting, name in named_files(config):
        if name in machine.missing_files:
            problem, remedy = f"no such file (from {machine.folder})", "Prepare the data, or give an absolute path."
            yield Fault(setting, problem, "a file that is there", remedy, value=name)
            return


@rule("batch-exceeds-data", of_machine=True, about="the batch against the rows")
def batch_exceeds_data(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """verl counts the steps of an epoch, and divides by their number."""
    if (rows := _train_rows(config, machine)) < config.data.train_batch_size:
        problem = f"the training files have {rows} rows: no batch is full, and verl divides by zero steps an epoch"
        remedy = "Lower it, or train on more problems (data.train_files, data.train_max_samples)."
        yield Fault("data.train_batch_size", problem, f"at most {rows}", remedy)


@rule("epochs-end-first", "warning", of_machine=True, about="steps against epochs")
def epochs_end_first(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """verl counts steps and epochs, and ends with what ends first."""
    asked, epochs = config.trainer.get("total_training_steps"), config.trainer.total_epochs
    if asked is None or (rows := _train_rows(config, machine)) == math.inf or rows < config.data.train_batch_size:
        return
    steps = int(rows) // config.data.train_batch_size
    if steps * epochs < asked:
        problem = f"an epoch has {steps} steps: the run ends after {steps * epochs}, not {asked} (total_training_steps)"
        enough, setting = math.ceil(asked / steps), "trainer.total_epochs"
        yield Fault(setting, problem, f"at least {enough}", f"Set {setting}={enough}, or fewer steps.")


def _train_rows(config: DictConfig, machine: Machine) -> float:
    """Return how many problems a run trains on; inf where this machine cannot tell."""
    limit = config.data.get("train_max_samples", -1)
    rows = math.inf if machine.train_rows is None or not is_verls_dataset(config) else machine.train_rows
    return min(rows, limit if limit > 0 else math.inf)


@rule("reward-function-missing", of_machine=True, about="the reward function and its keywords")
def reward_function(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """The reward function is in its file, and takes the keywords that it is given: else the reward workers stop."""
    path, name = (OmegaConf.select(config, f"{REWARD}.{key}") for key in ("path", "name"))
    if not path or (names := machine.reward_names) is None:
        return
    if name not in names:
        functions = ", ".join(sorted(each for each in names if not each.startswith("_")))
        setting = f"{REWARD}.{'name' if names else 'path'}"
        problem = f"{path} defines no such function" if names else "there is no such module, or it cannot be read"
        allowed = functions or "a file, or pkg:// and a module of an installed package"
        yield Fault(setting, f"{problem}: verl stops in the reward workers", allowed, "Correct the name, or the path.")
    elif (taken := names[name]) is not None:
        for key in OmegaConf.select(config, f"{REWARD}.reward_kwargs") or {}:
            if key not in taken:
                setting = f"{REWARD}.reward_kwargs.{key}"
                problem = f"{name} takes no such keyword: the first response ends in a TypeError"
                yield Fault(setting, problem, ", ".join(sorted(taken)), "Correct it, or leave it out.")


@rule("folder-not-writable", of_machine=True)
def folders(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """A run can write where it is told to; the first checkpoint is hours in."""
    for setting, path in written_folders(config):
        if path in machine.unwritable:
            problem = "nothing can be written there, which the first checkpoint would show"
            remedy = f"Set {setting}, or give this user the right to write there."
            yield Fault(setting, problem, "a folder that can be made and written to", remedy, value=path)


@rule("package-not-installed", of_machine=True)
def packages(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """verl imports a logger's package once everything is loaded, and others in its workers."""
    for setting, name, package in needed_packages(config):
        if package in machine.missing_packages:
            remedy = f"Install it on every host (pip install {PIP.get(package, package)}), or leave {setting} out."
            problem = f"{name} needs the package {package}, which is not installed"
            yield Fault(setting, problem, "what needs no package, or an installed one", remedy)


@rule("column-missing", of_machine=True, about="the column of prompts")
def columns(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """The column that verl's data set reads prompts from; a data set class of the user's own may make it."""
    if (known := machine.columns) is None or not is_verls_dataset(config):
        return
    if (column := config.data.prompt_key) not in known:
        problem, remedy = f"the training files have no column {column}: no prompt is read", "Correct it, or the file."
        yield Fault("data.prompt_key", problem, f"of the columns {', '.join(known)}", remedy)
