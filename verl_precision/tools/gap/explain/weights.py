"""Weights: a copy that 16 bits hold exactly, one with an adapter merged, and in what two checkpoints differ."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from verl_precision.base.content import content_digest
from verl_precision.base.dtypes import DTYPES, torch_dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder
from verl_precision.integration.engine.weight_export import layers_without_weights, sources, untied
from verl_precision.tools.engines.model import load_tokenizer, model_location

_NAMED = 3  # tensors that a sentence names


def rounded_copy(model: str, dtype: str, target: Path) -> str:
    """Return where weights are that are rounded to bf16 or fp16: the model itself if it has such, else a copy.

    The copy is made in the folder `target`; one that exists is used again.
    """
    if target.exists():
        return str(target)
    files, to = _files(model), torch_dtype(dtype)
    if all(_has_only(file, DTYPES[dtype].safetensors) for file in files):
        return str(files[0].parent)
    with new_folder(target) as folder:
        for file in files:
            rounded = {name: t.to(to) if t.is_floating_point() else t for name, t in load_file(file).items()}
            save_file(rounded, folder / file.name, {"format": "pt"})
        for other in files[0].parent.iterdir():
            if other.is_file() and other.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(other, folder / other.name)
    return str(target)


def _has_only(file: Path, dtype: str) -> bool:
    with safe_open(file, "pt") as saved:
        return {saved.get_slice(name).get_dtype() for name in saved.keys()} == {dtype}


def adapter_fingerprint(adapter: str) -> str:
    """Return a digest of a LoRA adapter, as peft's `save_pretrained` writes it."""
    files = [Path(adapter) / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    if not all(file.is_file() for file in files):
        problem, allowed = "there is no adapter in it", f"a folder with {files[0].name} and {files[1].name}"
        remedy = "Name the folder lora_adapter of a checkpoint: .../global_step_N/actor/lora_adapter."
        raise ConfigurationError(problem, setting="--adapter", value=adapter, allowed=allowed, remedy=remedy)
    return content_digest(files)


def merged_copy(model: str, adapter: str, target: Path) -> str:
    """Return where a model lies into which an adapter is merged in FP32; one that exists is used again."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if not target.exists():
        base = AutoModelForCausalLM.from_pretrained(model_location(model), dtype=torch.float32)
        tied = base.all_tied_weights_keys
        adapted: Any = PeftModel.from_pretrained(base, adapter)
        held = adapted.state_dict()
        found = sources(held, layers_without_weights(adapted))
        if untied(found, tied, lambda one, other: torch.equal(held[one], held[other])):
            base.config.tie_word_embeddings = False
        with new_folder(target) as folder:
            weights = {name: source.value(held.__getitem__) for name, source in found.items()}
            base.save_pretrained(folder, state_dict=weights)
            load_tokenizer(model).save_pretrained(folder)
    return str(target)


def different_weights(one: str, other: str) -> str:
    """Say which tensors of two checkpoints differ, in words: all after a training step, a few after a wrong sync."""
    with ExitStack() as stack:

        def places(model: str) -> dict[str, Any]:
            opened = [stack.enter_context(safe_open(file, "pt")) for file in _files(model)]
            return {name: file for file in opened for name in file.keys()}

        ones, others = places(one), places(other)
        names, both = sorted(ones.keys() | others.keys()), ones.keys() & others.keys()
        equal = {name for name in both if ones[name].get_tensor(name).equal(others[name].get_tensor(name))}
    differing = [name for name in names if name not in equal]
    named = ": " + ", ".join(differing[:_NAMED]) + (", ..." if len(differing) > _NAMED else "")
    return f"{len(differing)} of {len(names)} tensors differ" + (named if differing else "")


def _files(model: str) -> list[Path]:
    location = Path(model_location(model))
    source = location if location.is_dir() else Path(snapshot_download(model))
    if files := sorted(source.glob("*.safetensors")):
        return files
    problem, remedy = f"{model}: it has no *.safetensors", "Load it with transformers, and save it again."
    raise ConfigurationError(problem, allowed="a model saved by transformers' save_pretrained", remedy=remedy)
