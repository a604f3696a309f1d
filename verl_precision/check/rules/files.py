"""Rules of what a config names on the machine at hand: data, the reward function, folders, loggers' packages."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.rules.rule import Faults, Machine, rule, told
from verl_precision.integration.trainer.saving import saves

DATA_ENDINGS = (".parquet", ".json", ".jsonl")  # RLHFDataset._read_files_and_tokenize
DATA = ("data.train_files", "data.val_files")
REWARD = "reward.custom_reward_function"
# Rewards of this package, which ask math-verify.
ANSWER_REWARDS = tuple(f"pkg://verl_precision.integration.rewards.{name}" for name in ("boxed_answer", "answer_tag"))
TASKS_REWARD = "pkg://verl_precision.tools.rewards.reasoning_gym_answer"
# Packages of verl's loggers that have one (verl.utils.tracking).
LOGGER_PACKAGES = {name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")}
LOGGER_PACKAGES |= {"tracking": "wandb", "vemlp_wandb": "volcengine_ml_platform"}
ENGINE_PACKAGES = {"sglang": "sglang", "trtllm": "tensorrt_llm"}  # of rollouts; vLLM's own rules ask for its version
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
    """Return setting, name and package of each logger, engine and optimizer that needs one."""
    rollout, actor = str(config.actor_rollout_ref.rollout.name), config.actor_rollout_ref.actor
    optimizer = str(actor.optim.get("optimizer_impl", "torch"))
    loggers = [name for name in map(str, names_in(config, "trainer.logger")) if name in LOGGER_PACKAGES]
    named = [("trainer.logger", name, LOGGER_PACKAGES[name]) for name in loggers]
    if rollout in ENGINE_PACKAGES:
        named.append(("actor_rollout_ref.rollout.name", rollout, ENGINE_PACKAGES[rollout]))
    if config.actor_rollout_ref.model.get("use_liger"):
        named.append(("actor_rollout_ref.model.use_liger", "True", "liger_kernel"))
    if OmegaConf.select(config, f"{REWARD}.path") == TASKS_REWARD:
        named.append((f"{REWARD}.path", TASKS_REWARD, "reasoning_gym"))
    return [*named, ("actor_rollout_ref.actor.optim.optimizer_impl", optimizer, optimizer.partition(".")[0])]


def written_folders(config: DictConfig) -> list[tuple[str, str]]:
    """Return setting and path of each folder that a run writes to."""
    settings = ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    if saves(config):
        settings.append("trainer.default_local_dir")
    found = [(setting, OmegaConf.select(config, setting)) for setting in settings]
    return [(setting, str(path)) for setting, path in found if path is not None]


@rule("data-format-unknown")
def data_files(config: DictConfig, environment: object) -> Faults:
    """verl reads training and validation files before it starts a worker, by their endings."""
    for setting in DATA if is_verls_dataset(config) else ():
        if not all(str(name).endswith(DATA_ENDINGS) for name in names_in(config, setting) or [None]):
            yield told("data-format-unknown", setting=setting, endings=", ".join(DATA_ENDINGS))


@rule("files-missing", of_machine=True)
def missing_files(config: DictConfig, machine: Machine) -> Faults:
    """Data files and the reward function are there. One missing file is enough."""
    for setting, name in named_files(config):
        if name in machine.missing_files:
            yield told("files-missing", setting=setting, value=name, machine=machine)
            return


@rule("batch-exceeds-data", of_machine=True, about="the batch against the rows")
def batch_exceeds_data(config: DictConfig, machine: Machine) -> Faults:
    """verl counts the steps of an epoch, and divides by their number."""
    rows, size = _train_rows(config, machine), config.data.train_batch_size
    if rows < size:
        yield told("batch-exceeds-data", rows=rows)


@rule("epochs-end-first", "warning", of_machine=True, about="steps against epochs")
def epochs_end_first(config: DictConfig, machine: Machine) -> Faults:
    """verl counts steps and epochs, and ends with what ends first."""
    asked, epochs = config.trainer.get("total_training_steps"), config.trainer.total_epochs
    if asked is None:
        return
    rows, size = _train_rows(config, machine), config.data.train_batch_size
    if rows == math.inf or rows < size:
        return
    steps = int(rows) // size
    if steps * epochs < asked:
        yield told("epochs-end-first", steps=steps, made=steps * epochs, asked=asked, enough=math.ceil(asked / steps))


def _train_rows(config: DictConfig, machine: Machine) -> float:
    """Return how many problems a run trains on; inf where this machine cannot tell."""
    limit = config.data.get("train_max_samples", -1)
    rows = math.inf if machine.train_rows is None or not is_verls_dataset(config) else machine.train_rows
    return min(rows, limit if limit > 0 else math.inf)


@rule("reward-function-missing", of_machine=True, about="the reward function and its keywords")
def reward_function(config: DictConfig, machine: Machine) -> Faults:
    """The reward function is in its file, and takes the keywords that it is given."""
    path, name = (OmegaConf.select(config, f"{REWARD}.{key}") for key in ("path", "name"))
    if not path:
        return
    given, taken = OmegaConf.select(config, f"{REWARD}.reward_kwargs") or {}, (machine.reward_names or {}).get(name)
    if machine.reward_names == {}:
        yield told("reward-function-missing module")
    elif machine.reward_names is not None and name not in (names := machine.reward_names):
        functions = ", ".join(sorted(each for each in names if not each.startswith("_")))
        yield told("reward-function-missing function", path=path, functions=functions or "a function of that file")
    if taken is not None:
        for key in (each for each in given if each not in taken):
            yield told("reward-function-missing keyword", key=key, name=name, taken=", ".join(sorted(taken)))


@rule("math-verify-missing", of_machine=True)
def math_verify(config: DictConfig, machine: Machine) -> Faults:
    """The rewards of the paper's recipes compare answers with math-verify."""
    if OmegaConf.select(config, f"{REWARD}.path") in ANSWER_REWARDS and not machine.math_verify:
        yield told("math-verify-missing")


@rule("folder-not-writable", of_machine=True)
def folders(config: DictConfig, machine: Machine) -> Faults:
    """A run can write where it is told to; the first checkpoint is hours in."""
    for setting, path in written_folders(config):
        if path in machine.unwritable:
            yield told("folder-not-writable", setting=setting, value=path)


@rule("package-not-installed", of_machine=True)
def packages(config: DictConfig, machine: Machine) -> Faults:
    """verl imports a logger's package once everything is loaded, and others in its workers."""
    for setting, name, package in needed_packages(config):
        if package in machine.missing_packages:
            yield told("package-not-installed", setting=setting, name=name, package=package)


@rule("column-missing", of_machine=True, about="the column of prompts")
def columns(config: DictConfig, machine: Machine) -> Faults:
    """The column that verl's data set reads prompts from; a data set class of the user's own may make it."""
    if machine.columns is None or not is_verls_dataset(config):
        return
    if (column := config.data.prompt_key) not in machine.columns:
        yield told("column-missing", column=column, columns=", ".join(machine.columns))
