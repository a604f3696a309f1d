"""A digest of every tensor that the trainer sends, as the last item of its weight stream.

The digest sees bits, not values: two tensors that differ in one rounding differ here, and NaN equals itself.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

MANIFEST_NAME = "__verl_precision_manifest__"

_PERIOD = 65521  # p; prime, so that the cycle of positions does not align with a tensor's rows
_ROWS = 256  # rows of p elements summed at a time, so that an int64 copy takes 128 MiB at most
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDigest:
    """Dtype, shape and two sums over the elements' bit patterns bᵢ, read as integers."""

    dtype: str  # without "torch."
    shape: list[int]
    plain: int  # Σ bᵢ mod 2⁶⁴
    weighted: int  # Σ (1 + i mod 65521)·bᵢ mod 2⁶⁴, which depends on the order


def bit_view(tensor: Tensor) -> Tensor:
    """Return the elements' bit patterns as integers, flat: NaN equals itself, -0.0 differs from 0.0."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def digest(tensor: Tensor) -> TensorDigest:
    """Digest a tensor's bits: equal for equal bits, dtype and shape.

    Args:
        tensor: Any shape, dtype and device, but no DTensor.
    """
    bits = bit_view(tensor)
    whole = bits.numel() // _PERIOD * _PERIOD
    columns = bits[whole:].to(torch.int64)
    if whole:  # rows of p elements: those of a column have the same weight, so that columns are summed first
        columns = nn.functional.pad(columns, (0, _PERIOD - columns.numel()))
        for rows in bits[:whole].split(_ROWS * _PERIOD):
            columns += rows.view(-1, _PERIOD).sum(0, dtype=torch.int64)
    position = torch.arange(1, columns.numel() + 1, device=bits.device)
    plain, weighted = torch.stack([columns.sum(), (columns * position).sum()]).tolist()
    return TensorDigest(_name(tensor.dtype), list(tensor.shape), plain % 2**64, weighted % 2**64)


def send_with_manifest(
    weights: Iterable[tuple[str, Tensor]], reply_to: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream unchanged, then the manifest as a uint8 tensor of JSON.

    Args:
        weights: (name, tensor) in the order in which they are sent.
        reply_to: File for the receiver's report, on a file system that both sides see, or None.
    """
    digests: dict[str, TensorDigest] = {}
    for name, tensor in weights:
        digests[name] = digest(tensor)
        yield name, tensor
    content = {"tensors": {name: asdict(digest) for name, digest in digests.items()}, "reply_to": reply_to}
    yield MANIFEST_NAME, torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def read_manifest(tensor: Tensor) -> tuple[dict[str, TensorDigest], str | None]:
    """Return the digests by name, and the file for the receiver's report, that `send_with_manifest` sent."""
    content = json.loads(tensor.cpu().numpy().tobytes())
    return {name: TensorDigest(**fields) for name, fields in content["tensors"].items()}, content["reply_to"]


def differences(sent: dict[str, TensorDigest], received: dict[str, TensorDigest]) -> list[str]:
    """Return one line for each tensor that did not arrive as it was sent."""
    problems = []
    for name in sorted(sent.keys() | received.keys()):
        a, b = sent.get(name), received.get(name)
        if b is None:
            problems.append(f"{name}: sent by the trainer, never received")
        elif a is None:
            problems.append(f"{name}: received, but the trainer did not send it")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            problems.append(f"{name}: sent as {a.dtype}{a.shape}, arrived as {b.dtype}{b.shape}")
        elif a != b:
            problems.append(f"{name}: {a.dtype}{a.shape} arrived with other values")
    return problems


def rounded_on_the_way(received: dict[str, TensorDigest], rollout_dtype: torch.dtype) -> list[str]:
    """Return one line for each tensor that arrived with fewer bits of mantissa than the rollout holds.

    Args:
        received: Name -> digest of what arrived. 8-bit floats, which only quantised rollouts get, are allowed.
        rollout_dtype: Dtype of the rollout's model.
    """
    problems = []
    for name, arrived in sorted(received.items()):
        dtype = getattr(torch, arrived.dtype)
        if dtype.is_floating_point and dtype.itemsize > 1 and torch.finfo(dtype).eps > torch.finfo(rollout_dtype).eps:
            problems.append(f"{name}: arrived in {arrived.dtype}, too coarse for a rollout in {_name(rollout_dtype)}")
    return problems


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
