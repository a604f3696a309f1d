"""A copy of a checkpoint whose weights a 16-bit dtype holds exactly, so that an FP32 engine computes with those."""

import shutil
from pathlib import Path

from verl_precision.engine.settings import DTYPES
from verl_precision.errors import ConfigurationError
from verl_precision.files import new_folder
from verl_precision.sampling.model import model_location

_WEIGHTS = "*.safetensors"
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
    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    from safetensors.torch import save_file

    if target.exists():
        return str(target)
    location = Path(model_location(model))
    source = location if location.is_dir() else Path(snapshot_download(model))
    files = sorted(source.glob(_WEIGHTS))
    if not files:
        raise ConfigurationError(
            f"{model}: it has no {_WEIGHTS}, whose weights can be rounded",
            allowed="a model saved by transformers' save_pretrained",
            remedy="Load it with transformers, and save it again.",
        )
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


def _dtypes(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as saved:
        return {saved.get_slice(name).get_dtype() for name in saved.keys()}
