"""A digest of every tensor the trainer sends, as the last item of its own weight stream.

The digest sees bits, not values: two tensors that differ in one rounding differ here, and NaN equals itself.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

MANIFEST_NAME = "__verl_precision_manifest__"

# Elements folded at a time: bounds the int64 copy to 128 MiB per chunk, whatever the tensor's size.
_CHUNK = 1 << 24
# Weights 1.._PERIOD cycle over the elements, so that swapped elements change the digest; prime, so that the cycle
# does not align with a tensor's rows.
_PERIOD = 65521

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_view(tensor: Tensor) -> Tensor:
    """Return the elements' bit patterns as integers, flat: NaN equals itself, -0.0 differs from 0.0."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGER[flat.element_size()])


@dataclass(frozen=True)
class TensorDigest:
    """What is kept of one tensor.

    Attributes:
        dtype: `str(tensor.dtype)`.
        shape: its shape.
        plain: Σ bᵢ mod 2⁶⁴ over the elements' bit patterns bᵢ read as integers.
        weighted: Σ (1 + i mod p)·bᵢ mod 2⁶⁴, p = 65521: sensitive to order.
    """

    dtype: str
    shape: tuple[int, ...]
    plain: int
    weighted: int


def digest(tensor: Tensor) -> TensorDigest:
    """Digest a tensor's bit pattern: Σ bᵢ and Σ (1 + i mod p)·bᵢ, both mod 2⁶⁴.

    Args:
        tensor: any shape and dtype, any device; read only. Not a DTensor.

    Returns:
        The digest; equal for equal bits, dtype and shape. An empty tensor digests to zeros.
    """
    bits = bit_view(tensor)
    plain = weighted = 0
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=chunk.device) % _PERIOD + 1
        plain += int(chunk.sum())
        weighted += int((chunk * position).sum())
    return TensorDigest(str(tensor.dtype), tuple(tensor.shape), plain % 2**64, weighted % 2**64)


@dataclass(frozen=True)
class Manifest:
    """What the trainer says of a weight stream, at its end.

    Attributes:
        tensors: name -> digest of every tensor sent.
        reply_to: file in which the receiver says what it could verify (`weight_sync.report`), or None.
    """

    tensors: dict[str, TensorDigest]
    reply_to: str | None = None


def send_with_manifest(
    weights: Iterable[tuple[str, Tensor]], reply_to: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream unchanged, then one more item: the manifest, as a uint8 tensor of JSON.

    Args:
        weights: (name, tensor) in the order in which they are sent.
        reply_to: file for the receiver's report, on a file system that both sides see, or None.
    """
    digests: dict[str, TensorDigest] = {}
    for name, tensor in weights:
        digests[name] = digest(tensor)
        yield name, tensor
    yield MANIFEST_NAME, encode(Manifest(digests, reply_to))


def encode(manifest: Manifest) -> Tensor:
    """Return the manifest as a 1-D uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(asdict(manifest)).encode()), dtype=torch.uint8)


def decode(tensor: Tensor) -> Manifest:
    """Return the manifest that `encode` was given."""
    raw = json.loads(bytes(tensor.cpu().numpy().tobytes()))
    tensors = {
        name: TensorDigest(**{**value, "shape": tuple(value["shape"])}) for name, value in raw["tensors"].items()
    }
    return Manifest(tensors, raw["reply_to"])


def differences(sent: dict[str, TensorDigest], received: dict[str, TensorDigest]) -> list[str]:
    """Say, one line a tensor, what did not arrive as it was sent; empty when everything did."""
    problems = [f"{name}: sent by the trainer, never received" for name in sent.keys() - received.keys()]
    problems += [f"{name}: received, but the trainer did not send it" for name in received.keys() - sent.keys()]
    for name in sent.keys() & received.keys():
        a, b = sent[name], received[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            problems.append(f"{name}: sent as {a.dtype}{list(a.shape)}, arrived as {b.dtype}{list(b.shape)}")
        elif a != b:
            problems.append(f"{name}: {a.dtype}{list(a.shape)} arrived with other values")
    return sorted(problems)


def rounded_on_the_way(received: dict[str, TensorDigest], rollout_dtype: torch.dtype) -> list[str]:
    """Say, one line a tensor, which weights came with fewer bits of mantissa than the rollout holds.

    Args:
        received: digests of what arrived.
        rollout_dtype: of the rollout's model. 8-bit formats, which only quantised rollouts get, do not count.
    """
    problems = []
    for name, arrived in received.items():
        dtype = getattr(torch, arrived.dtype.removeprefix("torch."))
        if dtype.is_floating_point and dtype.itemsize > 1 and torch.finfo(dtype).eps > torch.finfo(rollout_dtype).eps:
            problems.append(
                f"{name}: arrived in {arrived.dtype.removeprefix('torch.')}, too coarse for a rollout in "
                f"{str(rollout_dtype).removeprefix('torch.')}"
            )
    return sorted(problems)
