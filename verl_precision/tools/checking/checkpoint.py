"""Do a checkpoint's weights survive a cast to FP16? Tensor by tensor and in slices, never the whole.

FP16 holds magnitudes up to 65504; below 2**-14 its numbers are subnormal and lose bits, and what is not above 2**-25
becomes zero. A weight beyond 65504 becomes infinite and the model's output NaN; subnormal and flushed weights are
normal in small numbers (they contribute little), and suspicious in large ones.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_precision.base.dtypes import DTYPES
from verl_precision.base.errors import ConfigurationError

FP16_MAX = 65504.0
FP16_TO_INF = 65520.0  # halfway between 65504 and 2**16: rounds to infinity
FP16_SMALLEST_NORMAL = 2.0**-14
FP16_TO_ZERO = 2.0**-25  # half the smallest subnormal: rounds to even, which is zero
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
        lost = [tensor.lost for tensor in self.tensors if tensor.lost]
        if lost:
            where = f"{sum(lost)} weight(s) in {len(lost)} tensor(s)"
            return f"not for FP16: {where} are not finite in FP16. Use precision=bf16."
        flushed = sum(tensor.flushed > FLUSH_WARNING for tensor in self.tensors)
        if flushed:
            where = f"{flushed} tensor(s) lose more than {FLUSH_WARNING:.0%} of their weights to zero"
            return f"every weight is finite in FP16, but {where}"
        return "every weight fits FP16"

    def as_dict(self) -> dict:
        """Return it for machines."""
        largest = max((tensor.largest for tensor in self.tensors), default=0.0)
        return {
            "model": str(self.path),
            "ok": self.ok,
            "verdict": self.verdict,
            "elements": sum(tensor.elements for tensor in self.tensors),
            "headroom": FP16_MAX / largest if largest else None,
            "skipped": self.skipped,
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }


def audit_checkpoint(
    path: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> CheckpointReport:
    """Audit every floating-point tensor of a safetensors checkpoint.

    The path is a folder in Hugging Face format, sharded or not, or one .safetensors file; one that is missing or broken
    is a ConfigurationError. `on_progress` is called with (bytes done, bytes in all) after each slice.
    """
    from safetensors import SafetensorError, safe_open

    files = checkpoint_files(path)
    total, done = sum(file.stat().st_size for file in files), 0
    tensors: list[TensorReport] = []
    skipped: list[str] = []

    def on_slice(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, total)

    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.offset_keys():
                    dtype = content.get_slice(name).get_dtype()
                    if dtype not in STORED:
                        skipped.append(name)
                        continue
                    tensors.append(audit_tensor(name, dtype, _pieces(content, name, on_slice)))
        except SafetensorError as error:
            raise _broken(file, f"not a readable safetensors file ({error})") from error
    on_progress(total, total)
    return CheckpointReport(path, worst_first(tensors), skipped)


def worst_first(tensors: list[TensorReport]) -> list[TensorReport]:
    """Return tensors in the order in which they are shown."""
    return sorted(tensors, key=lambda tensor: (tensor.lost, tensor.flushed, tensor.largest), reverse=True)


def checkpoint_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint; a file that is missing is named by a ConfigurationError."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    index = path / INDEX
    if index.is_file():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        problem, remedy = "no safetensors file there", "Save the model with save_pretrained first."
        allowed = "a folder in Hugging Face format with model.safetensors or its shards, or one .safetensors file"
        raise ConfigurationError(problem, setting="--model", value=path, allowed=allowed, remedy=remedy)
    for file in files:
        if not file.is_file():
            raise _broken(path, f"{file.name}, which {INDEX} names, is missing")
    return files


def _broken(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(problem, setting="--model", value=path, remedy="Download the checkpoint again.")


def _pieces(content: Any, name: str, on_slice: Callable[[int], None]) -> Iterator:
    """Yield a tensor in slices of some rows, flat; it is mapped, and its pages go when the memory is needed."""
    described = content.get_slice(name)
    if not (shape := described.get_shape()):
        yield content.get_tensor(name).flatten()
        return
    rows = max(SLICE_ELEMENTS // max(math.prod(shape[1:]), 1), 1)
    for first in range(0, shape[0], rows):
        yield (piece := described[first : first + rows].flatten())
        on_slice(piece.nbytes)


def audit_tensor(name: str, dtype: str, pieces: Iterable) -> TensorReport:
    """Audit one tensor, given as flat slices, whose dtype has this name in safetensors."""
    elements, largest, counts = 0, 0.0, [0, 0, 0, 0]
    for values in pieces:
        piece_largest, *piece = _count(values)
        elements, largest = elements + values.numel(), max(largest, piece_largest)
        counts = [sum(pair) for pair in zip(counts, piece, strict=True)]
    overflows, not_finite, subnormal, flushed = counts
    share = 1 / max(elements, 1)
    return TensorReport(name, dtype, elements, largest, overflows, not_finite, subnormal * share, flushed * share)


def _count(values) -> tuple[float, int, int, int, int]:
    """Return largest finite magnitude, overflows, not finite, subnormal and flushed of one piece."""
    # Compared as integers: without the sign bit, floats are ordered as their bit patterns are. That, and counting with
    # `count_nonzero`, is several times cheaper than a cast to FP32, or a sum or selection of booleans.
    import torch

    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]

    def bits(number: float) -> int:
        return int(torch.tensor(number, dtype=values.dtype).view(kind))

    magnitude = values.view(kind) & torch.iinfo(kind).max
    infinite = bits(float("inf"))
    overflows = not_finite = 0
    if int(magnitude.max()) >= bits(FP16_TO_INF):
        not_finite = int(torch.count_nonzero(magnitude >= infinite))
        overflows = int(torch.count_nonzero(magnitude >= bits(FP16_TO_INF))) - not_finite
        magnitude = magnitude[magnitude < infinite]
    largest = float(magnitude.max().view(values.dtype)) if magnitude.numel() else 0.0
    small = int(torch.count_nonzero(magnitude < bits(FP16_SMALLEST_NORMAL)))
    gone = int(torch.count_nonzero(magnitude <= bits(FP16_TO_ZERO)))
    zeros = magnitude.numel() - int(torch.count_nonzero(magnitude))
    return largest, overflows, not_finite, small - gone, gone - zeros
