"""Does a checkpoint fit FP16? Its weights, tensor by tensor, cast in slices, never the whole.

FP16 holds magnitudes up to 65504; below 2**-14 its numbers are subnormal and lose bits, and what is not above 2**-25
becomes zero. A weight beyond 65504 becomes infinite and the model's output NaN; subnormal and flushed weights are
normal in small numbers (they contribute little), and suspicious in large ones.
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
SLICE_ELEMENTS = 4 << 20  # Elements looked at in one go: 8 MiB in BF16, and a few temporaries of that size.
FLUSH_WARNING = 0.01  # More than this share of a tensor's non-zero weights rounded to zero is worth a look.
STORED = {known.safetensors: known.torch for known in DTYPES.values()} | {"F64": "float64"}  # read: their name in torch
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
        """One sentence."""
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

    The path is a folder in Hugging Face format, sharded or not, or one .safetensors file; one that is missing or broken
    is a ConfigurationError. `track` gets the tensors, and yields them: it may show how far it is.
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
    """Return a checkpoint's files: one, those that an index names, be they there or not, or all in a folder."""
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
    """Yield a tensor in slices of some rows, flat; it is mapped, and its pages go when the memory is needed."""
    described = content.get_slice(name)
    if not (shape := described.get_shape()):
        yield content.get_tensor(name).flatten()
        return
    rows = max(SLICE_ELEMENTS // max(math.prod(shape[1:]), 1), 1)
    for first in range(0, shape[0], rows):
        yield described[first : first + rows].flatten()


def audit_tensor(name: str, dtype: str, slices: Iterable[Any]) -> TensorReport:
    """Audit one tensor, given as flat slices, whose dtype has this name in safetensors."""
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
