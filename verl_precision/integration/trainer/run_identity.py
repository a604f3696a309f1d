"""Which run is this? The settings that make it another run, in its folder's name and beside its checkpoints.

verl resumes from whatever lies in `trainer.default_local_dir`: a run with a changed learning rate goes on from the old
one's checkpoint. Where a recipe's name is `${verl_precision.run_name:}`, the name gets a digest of the settings, so
that the same command finds its checkpoint and a changed one starts in a new folder. The folder's `run.yaml` keeps the
settings. A folder that belongs to another run is refused, with what differs.

Only the driver can know this: verl changes its config after the start, and Ray's workers resolve it again.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file

RUN_FILE = "run.yaml"
RUN_NAME_RESOLVER = "${verl_precision.run_name:}"  # as recipes write it
# What decides how a run learns. All else (names, folders, loggers, Ray, what is measured) leaves it the same run.
IDENTITY_BLOCKS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "distillation",
    "reward",
)
IDENTITY_TRAINER_KEYS = ("critic_warmup", "device", "n_gpus_per_node", "nnodes", "v1")
# Inside those parts: what changes speed, memory, rounding within a dtype, or what is shown. An operator who makes room
# after an out-of-memory error goes on with the same run.
IGNORED_SETTINGS = frozenset(
    ("checkpoint", "checkpoint_engine", "cudagraph_capture_sizes", "dataloader_num_workers")
    + ("disable_log_stats", "enable_activation_offload", "enable_chunked_prefill", "enable_gradient_checkpointing")
    + ("enforce_eager", "entropy_checkpointing", "entropy_from_logits_chunk_size", "every_n_steps")
    + ("filter_overlong_prompts_workers", "forward_max_token_len_per_gpu", "forward_micro_batch_size")
    + ("forward_micro_batch_size_per_gpu", "forward_prefetch", "free_cache_engine")
    + ("gpu_memory_utilization", "log_prob_chunk_tokens", "log_prob_max_token_len_per_gpu")
    + ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "max_num_batched_tokens")
    + ("max_num_seqs", "num_workers", "offload_policy", "optimizer_offload", "param_offload")
    + ("ppo_max_token_len_per_gpu", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "profiler", "prometheus")
    + ("reshard_after_forward", "send_weight_manifest", "trace", "use_torch_compile", "val_batch_size", "val_files")
    + ("val_kwargs", "val_max_samples", "validation_shuffle")
)

logger = logging.getLogger("verl_precision")


def name_the_run(config: DictConfig) -> None:
    """Put the digest of the settings behind the name, where the name is this package's.

    Args:
        config: The composed config, before verl or anybody changes it.
    """
    name = OmegaConf.to_container(config.trainer)["experiment_name"]
    if RUN_NAME_RESOLVER in str(name):
        config.trainer.experiment_name = f"{config.trainer.experiment_name}-{digest(settings_of_run(config))}"


def claim_folder(config: DictConfig) -> None:
    """Refuse a folder of checkpoints that belongs to another run; write down whose it is.

    Args:
        config: The composed config, its run named.

    Raises:
        ConfigurationError: If the folder has the checkpoints of a run with other settings.
    """
    folder = Path(config.trainer.default_local_dir)
    settings, known = settings_of_run(config), settings_in(folder)
    if known is not None and known != settings:
        name = f"{config.trainer.experiment_name}-2"
        raise ConfigurationError(
            f"it holds the checkpoints of a run with other settings ({differences(known, settings)}), from which verl "
            "would go on",
            setting="trainer.default_local_dir",
            value=str(folder),
            allowed="a folder of this run, or a new one",
            remedy=f"To start anew, give it a name or a folder of its own: trainer.experiment_name={name}. To go on "
            "from one of those checkpoints with the new settings, add trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={folder}/global_step_N. To go on with the old settings, give the old command.",
        )
    if known is None and (folder.exists() or _saves(config)):
        warn_about_sibling_runs(folder, settings)
        write_file(folder / RUN_FILE, yaml.safe_dump({"digest": digest(settings), "settings": settings}))


def settings_of_run(config: DictConfig) -> dict[str, Any]:
    """Return the settings that make a run, resolved, by their full names."""
    parts: dict[str, Any] = {name: _resolved(config, name) for name in IDENTITY_BLOCKS if name in config}
    parts["trainer"] = {
        name: _resolved(config.trainer, name) for name in IDENTITY_TRAINER_KEYS if name in config.trainer
    }
    settings = dict(_flat(parts, ""))
    mode = "trainer.v1.trainer_mode"
    if mode in settings:  # the variant that measures trains alike
        settings[mode] = settings[mode].removeprefix("vp_")
    return json.loads(json.dumps(settings, default=str))  # plain types, as they will be read back


def digest(settings: Mapping[str, Any]) -> str:
    """Return eight digits that other settings do not have."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], most: int = 5) -> str:
    """Say in which settings two runs differ.

    Args:
        old: Settings of the run that is there.
        new: Settings of the run that is to start.
        most: The number of settings that are named.
    """
    absent = "not set"
    changed = [name for name in sorted({*old, *new}) if old.get(name, absent) != new.get(name, absent)]
    named = [f"{name} was {old.get(name, absent)!r}, is {new.get(name, absent)!r}" for name in changed[:most]]
    return "; ".join([*named, *([f"and {len(changed) - most} more"] if len(changed) > most else [])])


def _resolved(node: DictConfig, name: str) -> Any:
    value = node[name]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for name, value in node.items():
        if name not in IGNORED_SETTINGS:
            yield from _flat(value, f"{path}.{name}" if path else str(name))


def settings_in(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run that a folder belongs to, or None where it says nothing."""
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        return dict(yaml.safe_load(path.read_text())["settings"])
    except (yaml.YAMLError, TypeError, KeyError, ValueError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}), so that nobody knows whose checkpoints these are",
            setting="trainer.default_local_dir",
            value=str(folder),
            remedy=f"Give another folder. Or remove {RUN_FILE}, if you know that these checkpoints are this run's.",
        ) from error


def _saves(config: DictConfig) -> bool:
    return config.trainer.save_freq > 0 or OmegaConf.select(config, "mismatch.alarm.on_alarm") == "stop"


def warn_about_sibling_runs(folder: Path, settings: Mapping[str, Any]) -> None:
    """Say from which run in the folder beside this one differs least: perhaps that one was to go on."""
    beside = {
        path.parent: dict(yaml.safe_load(path.read_text())["settings"]) for path in folder.parent.glob(f"*/{RUN_FILE}")
    }
    if beside:
        nearest = min(beside, key=lambda path: sum(settings.get(k) != v for k, v in beside[path].items()))
        logger.info(
            "a new run, in %s. It is not the one in %s: %s", folder, nearest, differences(beside[nearest], settings)
        )
