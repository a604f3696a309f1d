"""What could not be found out about a run, in the words of a verdict that counts what was not checked.

A rule that asks for something unknown finds nothing. Each entry here says which fields of `Environment` and `Machine`
are empty for want of one thing; `find_faults` makes one finding of it, with the subjects of the rules that asked.
"""

import os
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import engines
from verl_precision.check.models import Described, is_folder
from verl_precision.check.rules.files import REWARD, named_files
from verl_precision.check.rules.memory import beyond_arithmetic, gpu_bytes
from verl_precision.check.rules.rule import Environment, Machine, Unknown
from verl_precision.check.rules.run import HUB_NAME
from verl_precision.integration.ledger import REMEDY, lost_symbols

MODEL = "actor_rollout_ref.model.path"
GIVE = "Give --model-config FILE, the model's config.json or its folder, or check where the model is"
OF_MODEL = ("machine.parameters", "machine.missing_for_model", "machine.head_size")
# What this check asks of the hosts by symbols of the ledger, by the feature that has them.
ASKED = {
    "check of names": "names of losses, rollouts and dtypes",
    "check of tokenizers": "the tokenizer",
    "presets=win": "words of the command against presets",
    "check of losses": "the loss",
}
MEMORY = ("the trainer's memory", "vLLM's memory")


def unknown_things(config: DictConfig, found: Environment, known: Described) -> Iterator[Unknown]:
    """Yield what is unknown of a run after everything was looked for; `known` is what was found of the model."""
    yield from _of_model(config, found, known)
    yield from _of_other_models(config, found)
    yield from _of_hosts(config)
    yield from _of_machine(config, found)
    if found.machine is not None:
        yield from _of_files(config, found.machine)


def _of_model(config: DictConfig, found: Environment, known: Described) -> Iterator[Unknown]:
    path = str(config.actor_rollout_ref.model.path)
    files, is_here = frozenset({"tokenizer_problem"}), is_folder(path)
    if not known.content:
        fields = files | {"model", "shape", *OF_MODEL}
        cache = f"; `hf download {path} config.json` puts it into the hub's cache" if HUB_NAME.match(path) else ""
        yield Unknown("model-unknown", fields, MODEL, f"its config.json is {_absent(path)}", f"{GIVE}{cache}.")
        return
    if known.taken_from and not known.is_named:
        why = f"its config.json is {_absent(path)}; its shape is taken to be that of {known.taken_from}, by its name"
        subjects = ("the length of its context", "the chat template")
        yield Unknown("model-by-name", files, MODEL, why, f"{GIVE}.", subjects=subjects)
    elif not is_here:
        why = "the files of its tokenizer are not on this machine"
        template = () if "has_chat_template" in known.content else ("the chat template",)
        yield Unknown("tokenizer-unknown", files, MODEL, why, "Check again where the model is.", subjects=template)
    elif "vision_config" in known.content:
        why = "verl builds its prompts with the model's processor, and nobody has looked at that"
        yield Unknown("tokenizer-unknown", files, MODEL, why, "Try a first step with the data.")
    if found.shape is None:
        fields = frozenset({"shape", "machine.parameters"})
        why = f"the arithmetic knows no model of the kind {found.model.get('model_type', 'of its config.json')}"
        remedy = "Read perf/max_memory_allocated_gb after a first step."
        yield Unknown("shape-unknown", fields, MODEL, why, remedy)


def _absent(path: str) -> str:
    """Return where a model's config.json is not."""
    if HUB_NAME.match(path):
        return "not in this machine's cache of the hub"
    return "not in that folder" if is_folder(path) else "not here: there is no such folder"


def _of_other_models(config: DictConfig, found: Environment) -> Iterator[Unknown]:
    if not found.critic and any(engine.role == "critic" for engine in engines(config)):
        why, remedy = "the critic's config.json is not at hand", "Check again where the critic's model is."
        yield Unknown("critic-unknown", frozenset({"critic"}), "critic.model.path", why, remedy)
    adapter = "actor_rollout_ref.model.lora_adapter_path"
    if not found.adapter and OmegaConf.select(config, adapter) is not None:
        why, remedy = "its adapter_config.json is not at hand", "Check again where the adapter is."
        yield Unknown("adapter-unknown", frozenset({"adapter"}), adapter, why, remedy)


def _of_hosts(config: DictConfig) -> Iterator[Unknown]:
    """Yield what verl and Hydra cannot be asked, because a symbol of theirs is not as tested."""
    asked = [*ASKED] if OmegaConf.select(config, "actor_rollout_ref.model.external_lib") else [*ASKED][:-1]
    for feature in asked:
        for symbol, wrong in lost_symbols(feature).items():
            yield Unknown("host-unknown", frozenset(), symbol, wrong, f"{REMEDY}.", "changed", (ASKED[feature],))


def _of_machine(config: DictConfig, found: Environment) -> Iterator[Unknown]:
    if config.trainer.device == "cuda" and gpu_bytes(config, found) is None:
        why, remedy = "no GPU is here, and neither --gpu nor a scale names one", "Give --gpu NAME, e.g. --gpu H100."
        yield Unknown("gpu-unknown", frozenset({"gpus"}), "trainer.device", why, remedy)
    if config.trainer.device != "cpu" and (setting := beyond_arithmetic(config)):
        why = "the arithmetic of a GPU's memory knows FSDP without a critic, on CUDA, and vLLM on the same GPUs"
        remedy = "Read perf/max_memory_allocated_gb after a first step."
        yield Unknown("memory-unknown", frozenset(), setting, why, remedy, subjects=MEMORY)
    if found.vllm is None and config.actor_rollout_ref.rollout.name == "vllm":
        why, remedy = "vLLM is not installed here", "Check again in the run's environment."
        yield Unknown("vllm-unknown", frozenset({"vllm"}), "actor_rollout_ref.rollout.name", why, remedy)


def _of_files(config: DictConfig, machine: Machine) -> Iterator[Unknown]:
    train, data = "data.train_files", {"machine.columns": machine.columns, "machine.train_rows": machine.train_rows}
    if missing := frozenset(field for field, value in data.items() if value is None):
        absent = [name for setting, name in named_files(config) if setting == train and name in machine.missing_files]
        why = (
            f"{absent[0]} is not on this machine" if absent else "not all of them can be read here as Parquet or JSONL"
        )
        yield Unknown("data-unknown", missing, train, why, "Check again where the data is.")
    path, setting = OmegaConf.select(config, f"{REWARD}.path"), f"{REWARD}.path"
    if path and machine.reward_names is None:
        why = "only running it tells what it defines"
        if path in machine.missing_files or not (str(path).startswith("pkg://") or os.access(path, os.R_OK)):
            why = "it cannot be read here"
        yield Unknown(
            "reward-unknown", frozenset({"machine.reward_names"}), setting, why, "Check again where the file is."
        )
