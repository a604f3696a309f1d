"""One export: the range first, then the files, in a folder that appears whole or not at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from verl_precision.base.dtypes import DTYPES, long, torch_dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder
from verl_precision.integration.engine.weight_export import write_export_dtype
from verl_precision.tools.checking.checkpoint import (
    INDEX,
    SLICE_ELEMENTS,
    STORED,
    CheckpointReport,
    audit_tensor,
    worst_first,
)
from verl_precision.tools.export.card import CARD, model_card
from verl_precision.tools.export.shards import SavedModel

# Of one file, which is also what is in memory at a time, beside one tensor in FP32.
FILE_BYTES = 2 * 10**9
_SAVED_AS = {f"torch.{name}": stored for stored, name in STORED.items()}
# verl has put weights there if it was asked for `hf_model`.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")

OnProgress = Callable[[str, int, int], None]  # what is being done, tensors done, tensors in all


def export_checkpoint(checkpoint: Path, dtype: str, output: Path, on_progress: OnProgress) -> CheckpointReport:
    """Write the actor of a verl checkpoint, `global_step_N` or its `actor`, as a Hugging Face folder.

    Each weight is rounded once, from the dtype that was saved. A checkpoint that is not complete, a folder that exists,
    and a weight that is not finite in the dtype are refused. Returned is what a cast to FP16 does to each tensor.
    """
    if dtype not in DTYPES:
        raise ConfigurationError("there is no such dtype", setting="--dtype", value=dtype, allowed=", ".join(DTYPES))
    kind = torch_dtype(dtype)
    if output.exists():
        remedy = "Name a folder that does not."
        raise ConfigurationError("it exists; nothing was written", setting="--output", value=output, remedy=remedy)
    saved = SavedModel.find(checkpoint)
    source = saved.folder / "huggingface"
    report = _range(saved, checkpoint, kind, on_progress)
    with new_folder(output) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
        write_export_dtype(str(folder), long(dtype))
        if saved.untied:
            _untie(folder / "config.json")
        _write(saved, kind, folder, on_progress)
        step = saved.folder.parent if saved.folder.name == "actor" else saved.folder
        (folder / CARD).write_text(model_card(step, dtype, report.verdict))
    return report


def _range(saved: SavedModel, path: Path, kind: torch.dtype, on_progress: OnProgress) -> CheckpointReport:
    tensors, skipped = [], []
    for number, name in enumerate(saved.sources, 1):
        whole = saved.tensor(name)
        if str(whole.dtype) in _SAVED_AS:
            tensors.append(audit_tensor(name, _SAVED_AS[str(whole.dtype)], whole.flatten().split(SLICE_ELEMENTS)))
        else:
            skipped.append(name)
        on_progress("checking", number, len(saved.sources))
    report = CheckpointReport(path, worst_first(tensors), skipped)
    lost = [each for each in report.tensors if (each.lost if kind == torch.float16 else each.not_finite)]
    if lost:
        raise _overflow(kind, [f"{each.name} ({each.lost} of {each.elements})" for each in lost])
    return report


def _overflow(kind: torch.dtype, names: list[str]) -> ConfigurationError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ConfigurationError(
        f"{', '.join(names[:3])}{more}: weights that are not finite in {kind}; nothing was written",
        setting="--dtype",
        value=str(kind).removeprefix("torch."),
        allowed="a dtype that holds every weight",
        remedy="Export with --dtype bf16 or fp32. If a weight is infinite or NaN already, take an earlier checkpoint.",
    )


def _untie(path: Path) -> None:
    settings = json.loads(path.read_text())
    for described in (settings, settings.get("text_config")):
        if described:
            described["tie_word_embeddings"] = False
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _write(saved: SavedModel, kind: torch.dtype, folder: Path, on_progress: OnProgress) -> None:
    """Write the weights, a file at a time."""
    skeleton = saved.skeleton()
    planned: dict[str, Tensor] = {}
    source_of: dict[str, str] = {}
    for name in saved.sources:
        shape, stored = saved.shape_and_dtype(name)
        for key, tensor in _as_stored(skeleton, name, torch.empty(shape, dtype=_dtype(stored, kind), device="meta")):
            planned[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            source_of[key] = name
    split = split_torch_state_dict_into_shards(planned, max_shard_size=FILE_BYTES)
    done = 0
    for file, keys in split.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in dict.fromkeys(source_of[key] for key in keys):
            whole = saved.tensor(name)
            rounded = whole.to(_dtype(whole.dtype, kind))
            if not rounded.isfinite().all():
                raise _overflow(kind, [name])
            tensors |= {key: part.contiguous() for key, part in _as_stored(skeleton, name, rounded) if key in keys}
            done += 1
            on_progress("writing", done, len(saved.sources))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # safetensors lets nobody else read it
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _dtype(stored: torch.dtype, kind: torch.dtype) -> torch.dtype:
    return kind if stored.is_floating_point else stored


def _as_stored(skeleton: Any, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return a tensor as checkpoints have it: the experts of a layer, one tensor in memory, are several there."""
    if skeleton is None:
        return [(name, tensor)]
    return list(revert_weight_conversion(skeleton, {name: tensor}).items())
