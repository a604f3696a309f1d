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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file

RUN_FILE = "run.yaml"
RUN_NAME_RESOLVER = "${verl_precision.run_name:}"  # as recipes write it
# What decides how a run learns. All else (names, folders, loggers, Ray, what is measured) leaves it the same run.
IDENTITY_BLOCKS: tuple[str, ...] = ("actor_rollout_ref", "algorithm", "critic", "custom_reward_function")
IDENTITY_BLOCKS += ("data", "distillation", "reward")
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
    """Put the digest of the settings behind the name, where the name is this package's; before anybody changes them."""
    if RUN_NAME_RESOLVER in str(OmegaConf.to_container(config.trainer)["experiment_name"]):
        config.trainer.experiment_name = f"{config.trainer.experiment_name}-{digest(settings_of_run(config))}"


def claim_folder(config: DictConfig) -> None:
    """Refuse a folder with the checkpoints of a run with other settings; write down whose a new one is."""
    folder = Path(config.trainer.default_local_dir)
    settings, known = settings_of_run(config), settings_in(folder)
    if known is not None and known != settings:
        raise ConfigurationError(
            f"it holds the checkpoints of a run with other settings ({differences(known, settings)}), from which verl "
            "would go on",
            setting="trainer.default_local_dir",
            value=str(folder),
            allowed="a folder of this run, or a new one",
            remedy=f"To start anew, give it a name or a folder of its own: "
            f"trainer.experiment_name={config.trainer.experiment_name}-2. To go on from one of those checkpoints with "
            f"the new settings, add trainer.resume_mode=resume_path trainer.resume_from_path={folder}/global_step_N. "
            "To go on with the old settings, give the old command.",
        )
    saves = config.trainer.save_freq > 0 or OmegaConf.select(config, "mismatch.alarm.on_alarm") == "stop"
    if known is None and (folder.exists() or saves):
        warn_about_sibling_runs(folder, settings)
        write_file(folder / RUN_FILE, yaml.safe_dump({"digest": digest(settings), "settings": settings}))


def settings_of_run(config: DictConfig) -> dict[str, Any]:
    """Return the settings that make a run, resolved, by their full names."""
    parts = {**_chosen(config, IDENTITY_BLOCKS), "trainer": _chosen(config.trainer, IDENTITY_TRAINER_KEYS)}
    settings = dict(_flat(parts, ""))
    mode = "trainer.v1.trainer_mode"
    if mode in settings:  # the variant that measures trains alike
        settings[mode] = settings[mode].removeprefix("vp_")
    return json.loads(json.dumps(settings, default=str))  # plain types, as they will be read back


def digest(settings: Mapping[str, Any]) -> str:
    """Return eight digits that other settings do not have."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say in which settings the run that is to start differs from the one that is there, of at most five."""
    absent, most = "not set", 5
    changed = [name for name in sorted({*old, *new}) if old.get(name, absent) != new.get(name, absent)]
    named = [f"{name} was {old.get(name, absent)!r}, is {new.get(name, absent)!r}" for name in changed[:most]]
    return "; ".join([*named, *([f"and {len(changed) - most} more"] if len(changed) > most else [])])


def _chosen(node: DictConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the names that a node has, with their values resolved."""
    found = {name: node[name] for name in names if name in node}
    is_config, plain = OmegaConf.is_config, OmegaConf.to_container
    return {name: plain(value, resolve=True) if is_config(value) else value for name, value in found.items()}


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
    try:
        return _read(path) if path.exists() else None
    except (yaml.YAMLError, TypeError, KeyError, ValueError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}), so that nobody knows whose checkpoints these are",
            setting="trainer.default_local_dir",
            value=str(folder),
            remedy=f"Give another folder. Or remove {RUN_FILE}, if you know that these checkpoints are this run's.",
        ) from error


def _read(run_file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(run_file.read_text())["settings"])


def warn_about_sibling_runs(folder: Path, settings: Mapping[str, Any]) -> None:
    """Say from which run in the folder beside this one differs least: perhaps that one was to go on."""
    beside = {path.parent: _read(path) for path in folder.parent.glob(f"*/{RUN_FILE}")}
    if beside:
        nearest = min(beside, key=lambda path: sum(settings.get(k) != v for k, v in beside[path].items()))
        changed = differences(beside[nearest], settings)
        logger.info("a new run, in %s. It is not the one in %s: %s", folder, nearest, changed)
