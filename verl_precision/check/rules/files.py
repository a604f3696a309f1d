"""Rules of what a run finds, installs and writes on the machine at hand: files, packages, checkpoints."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import engines
from verl_precision.check.rules.gpu_memory import GIB, SINGLE
from verl_precision.check.rules.rule import Environment, Fault, Machine, rule
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
PIP = {"math_verify": '"math-verify[antlr4_9_3]"'}  # the antlr4 that Hydra has
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


def needed_packages(config: DictConfig) -> list[tuple[str, str, str]]:
    """Return setting, name and package of each logger and reward that needs one."""
    named = [("trainer.logger", str(name), LOGGER_PACKAGES) for name in names_in(config, "trainer.logger")]
    named.append((f"{REWARD}.path", str(OmegaConf.select(config, f"{REWARD}.path")), REWARD_PACKAGES))
    return [(setting, name, packages[name]) for setting, name, packages in named if name in packages]


def written_folders(config: DictConfig) -> list[tuple[str, str]]:
    """Return setting and path of each folder that a run writes to."""
    settings = ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    settings += ["trainer.default_local_dir"] if saves(config) else []
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
    """A logger's package is imported once everything is loaded, and a reward's after the first rollout."""
    for setting, name, package in needed_packages(config):
        if package in machine.missing_packages:
            remedy = f"Install it on every host (pip install {PIP.get(package, package)}), or leave {setting} out."
            problem = f"{name} needs the package {package}, which is not installed"
            yield Fault(setting, problem, "what needs no package, or an installed one", remedy)


@rule("one-checkpoint", "warning")
def one_checkpoint(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl removes the former checkpoint before all of the new one is written."""
    setting = "trainer.max_actor_ckpt_to_keep"
    if saves(config) and OmegaConf.select(config, setting) == 1:
        problem = "verl removes the former before the new one is complete: a run that ends in between has none"
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
        remedy = "Free some, name another folder, or keep fewer: trainer.max_actor_ckpt_to_keep."
        yield Fault("trainer.default_local_dir", problem, "a folder on a disk with that much space", remedy)


def checkpoint_bytes(config: DictConfig, parameters: int) -> int:
    """Return about how many bytes a checkpoint of the actor takes: FP32 weights, and Adam's two moments in FP32."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    adapter = (model.get("lora_rank") or 0) > 0  # its moments are those of the adapter: below 1% of the model
    sizes = {"model": SINGLE, "optimizer": 0 if adapter else MOMENTS, "hf_model": SINGLE}
    return parameters * sum(sizes.get(content, 0) for content in names_in(actor.checkpoint, "save_contents"))
