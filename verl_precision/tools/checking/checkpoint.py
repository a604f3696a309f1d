"""Checks whether a checkpoint fits FP16: casts its weights tensor by tensor, in slices, never a whole tensor.

FP16 holds magnitudes up to 65504. Below 2**-14 its numbers are subnormal and lose bits; magnitudes up to 2**-25 become
zero. A weight beyond 65504 becomes infinite, and the model's output NaN. A small number of subnormal and flushed
weights is normal, since they contribute little; a large number is suspicious.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.base.dtypes import DTYPES
from verl_precision.base.errors import ConfigurationError

FP16_SMALLEST_NORMAL = 2.0**-14
SLICE_ELEMENTS = 4 << 20  # Elements cast at a time: 8 MiB in BF16, and a few temporaries of that size.
FLUSH_WARNING = 0.01  # Warn if a larger share of a tensor's weights is rounded to zero.
STORED = {known.safetensors: known.torch for known in DTYPES.values()} | {"F64": "float64"}  # name in torch
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorReport:
    """One tensor, cast to FP16."""

    name: str  # name in the checkpoint
    dtype: str  # dtype in which it is stored
    elements: int
    largest: float  # max |w| of the finite ones
    overflows: int  # elements that become infinite
    not_finite: int  # elements that are infinite or NaN already
    subnormal: float  # share of all elements that become FP16 subnormals (and lose bits)
    flushed: float  # share of all elements that are not zero and become zero

    @property
    def lost(self) -> int:
        """Number of elements that are not finite in FP16."""
        return self.overflows + self.not_finite


@dataclass(frozen=True)
class CheckpointReport:
    """A whole checkpoint."""

    path: Path  # folder or file
    tensors: list[TensorReport]  # the floating-point tensors, worst first
    skipped: list[str]  # names of tensors that are not floating-point, or quantised

    @property
    def ok(self) -> bool:
        """Whether every weight is finite in FP16."""
        return not any(tensor.lost for tensor in self.tensors)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if not self.ok:
            lost = [tensor.lost for tensor in self.tensors if tensor.lost]
            where = f"{sum(lost)} weight(s) in {len(lost)} tensor(s)"
            return f"this model cannot run in FP16: {where} are not finite there. Use precision=bf16."
        if flushed := sum(tensor.flushed > FLUSH_WARNING for tensor in self.tensors):
            where = f"{flushed} tensor(s) have more than {FLUSH_WARNING:.0%} of their weights rounded to zero"
            return f"every weight is finite in FP16, but {where}"
        return "every weight fits FP16"


def audit_checkpoint(path: Path, track: Callable[[list], Iterable] = iter) -> CheckpointReport:
    """Audit every floating-point tensor of a safetensors checkpoint.

    The path is a folder in Hugging Face format, sharded or not, or one .safetensors file. A missing or broken file is a
    ConfigurationError. `track` yields the tensors' names, and may show progress.
    """
    from safetensors import SafetensorError, safe_open

    tensors: list[TensorReport] = []
    skipped: list[str] = []
    for file in _files_of(path):
        try:
            with safe_open(file, framework="pt") as content:
                for name in track(content.offset_keys()):
                    dtype = content.get_slice(name).get_dtype()
                    if dtype in STORED:
                        tensors.append(audit_tensor(name, dtype, _slices(content, name)))
                    else:
                        skipped.append(name)
        except (SafetensorError, OSError) as error:
            problem, remedy = f"{file} is not a readable safetensors file ({error})", "Download the checkpoint again."
            raise ConfigurationError(problem, setting="--model", value=path, remedy=remedy) from error
    tensors.sort(key=lambda tensor: (tensor.lost, tensor.flushed, tensor.largest), reverse=True)
    return CheckpointReport(path, tensors, skipped)


def _files_of(path: Path) -> list[Path]:
    """Return a checkpoint's files: one file, the files that an index names (missing ones too), or all in a folder."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    index = path / INDEX
    named = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
    files = sorted({path / name for name in named} or path.glob("*.safetensors"))
    if not files:
        problem, remedy = "no safetensors file there", "Save the model with save_pretrained first."
        allowed = "a folder in Hugging Face format with model.safetensors or its shards, or one .safetensors file"
        raise ConfigurationError(problem, setting="--model", value=path, allowed=allowed, remedy=remedy)
    return files


def _slices(content: Any, name: str) -> Iterator[Any]:
    """Yield a tensor in flat slices of some rows; the file is mapped, and its pages are freed if memory is short."""
    described = content.get_slice(name)
    if not (shape := described.get_shape()):
        yield content.get_tensor(name).flatten()
        return
    rows = max(SLICE_ELEMENTS // max(math.prod(shape[1:]), 1), 1)
    for first in range(0, shape[0], rows):
        yield described[first : first + rows].flatten()


def audit_tensor(name: str, dtype: str, slices: Iterable[Any]) -> TensorReport:
    """Audit one tensor, given as flat slices; `dtype` is the name of its dtype in safetensors."""
    elements, largest, overflows, not_finite, subnormal, flushed = 0, 0.0, 0, 0, 0, 0
    for values in filter(len, slices):
        magnitude, finite, cast = values.abs(), values.isfinite(), values.half()
        infinite = values.numel() - int(finite.count_nonzero())
        elements += values.numel()
        not_finite += infinite
        overflows += values.numel() - int(cast.isfinite().count_nonzero()) - infinite
        subnormal += int(((magnitude < FP16_SMALLEST_NORMAL) & (cast != 0)).count_nonzero())
        flushed += int(((values != 0) & (cast == 0)).count_nonzero())
        largest = max(largest, float(magnitude.where(finite, 0).max()))
    share = 1 / max(elements, 1)
    return TensorReport(name, dtype, elements, largest, overflows, not_finite, subnormal * share, flushed * share)
