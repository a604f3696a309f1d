"""Weights: those of two checkpoints compared, and a copy that 16 bits hold exactly, for an FP32 engine."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl_precision.engine.settings import DTYPES
from verl_precision.errors import ConfigurationError
from verl_precision.files import new_folder
from verl_precision.sampling.model import model_location

_WEIGHTS = "*.safetensors"
_NAMED = 3  # tensors that a sentence names
_NAMES = {"bf16": "BF16", "fp16": "F16"}  # of safetensors


def rounded_copy(model: str, dtype: str, target: Path) -> str:
    """Return where weights are that are rounded to a dtype: the model itself if it has such, else a copy.

    Args:
        model: A model as in `find_model`.
        dtype: bf16 or fp16.
        target: Folder of the copy; one that exists is used again.

    Raises:
        ConfigurationError: If the model has no safetensors.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    if target.exists():
        return str(target)
    files = _files(model)
    source = files[0].parent
    if all(found == _NAMES[dtype] for file in files for found in _dtypes(file)):
        return str(source)
    to = getattr(torch, DTYPES[dtype])
    with new_folder(target) as folder:
        for file in files:
            with safe_open(file, "pt") as saved:
                tensors = {name: saved.get_tensor(name) for name in saved.keys()}
            rounded = {name: t.to(to) if t.is_floating_point() else t for name, t in tensors.items()}
            save_file(rounded, folder / file.name, {"format": "pt"})
        for other in source.iterdir():
            if other.is_file() and other.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(other, folder / other.name)
    return str(target)


def different_weights(one: str, other: str) -> str:
    """Say which tensors of two checkpoints differ, in words: all after a training step, a few after a wrong sync."""
    from safetensors import safe_open

    def places(model: str) -> dict[str, Any]:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in _files(model)]
        return {name: file for file in opened for name in file.keys()}

    with ExitStack() as stack:
        ones, others = places(one), places(other)
        names = sorted(ones.keys() | others.keys())
        differing = [
            name
            for name in names
            if name not in ones
            or name not in others
            or not ones[name].get_tensor(name).equal(others[name].get_tensor(name))
        ]
    named = ": " + ", ".join(differing[:_NAMED]) + (", ..." if len(differing) > _NAMED else "")
    return f"{len(differing)} of {len(names)} tensors differ" + (named if differing else "")


def _files(model: str) -> list[Path]:
    from huggingface_hub import snapshot_download

    location = Path(model_location(model))
    source = location if location.is_dir() else Path(snapshot_download(model))
    files = sorted(source.glob(_WEIGHTS))
    if not files:
        raise ConfigurationError(
            f"{model}: it has no {_WEIGHTS}, whose weights can be rounded and compared",
            allowed="a model saved by transformers' save_pretrained",
            remedy="Load it with transformers, and save it again.",
        )
    return files


def _dtypes(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as saved:
        return {saved.get_slice(name).get_dtype() for name in saved.keys()}
