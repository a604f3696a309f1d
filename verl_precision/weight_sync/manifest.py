"""A digest of every tensor that the trainer sends, as the last item of its weight stream.

The digest sees bits, not values: two tensors that differ in one rounding differ here, and NaN equals itself. Each
tensor is read once. Its sums stay on the device, and all of them are fetched together, so that nothing waits for the
device while weights are sent.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

ANNOUNCEMENT_NAME = "__verl_precision_manifest_follows__"  # of the stream's first item; without it nobody digests
MANIFEST_NAME = "__verl_precision_manifest__"

_PERIOD = 4093  # p; prime, so that the cycle of positions does not align with a tensor's rows


@dataclass(frozen=True)
class TensorDigest:
    """Dtype, shape and two sums over the tensor's bytes.

    The bytes, filled up with zeros, are read as words of 64 bits. Word i belongs to column i mod 4093, and a column is
    the sum of its words mod 2⁶⁴, with the low half l and the high half h, each read as a signed number of 32 bits.
    """

    dtype: str  # without "torch."
    shape: list[int]
    plain: int  # Σ l + 2³²·h mod 2⁶⁴, which changes with any one bit
    weighted: int  # Σ (2j + 1)·l + (2j + 2)·h mod 2⁶⁴ over columns j = 0, 1, ..., which depends on the order


class StreamDigest:
    """The digests of a stream of tensors, on their way: `add` only gives work to the device, `fetch` waits for it."""

    def __init__(self) -> None:
        self._described: dict[str, tuple[str, list[int]]] = {}
        self._sums: dict[str, Tensor] = {}  # name -> the two sums, on the tensor's device
        self._weights: dict[torch.device, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest a tensor's bits (no DTensor): equal for equal bits, dtype and shape, on every device."""
        words = _words(tensor)
        whole = words.numel() // _PERIOD * _PERIOD
        columns = words
        if whole:  # the only pass over a large tensor
            columns = words[:whole].view(-1, _PERIOD).sum(0)
            columns[: words.numel() - whole].add_(words[whole:])
        if words.device not in self._weights:
            self._weights[words.device] = _weights(words.device)
        self._described[name] = dtype_name(tensor.dtype), list(tensor.shape)
        self._sums[name] = (columns.view(torch.int32) * self._weights[words.device][:, : 2 * columns.numel()]).sum(1)

    def fetch(self) -> dict[str, TensorDigest]:
        """Return name -> digest of the tensors so far, in their order."""
        sums: dict[str, list[int]] = {}
        for device in self._weights:
            names = [name for name, both in self._sums.items() if both.device == device]
            sums.update(zip(names, torch.stack([self._sums[name] for name in names]).tolist(), strict=True))
        return {
            name: TensorDigest(*described, *(one % 2**64 for one in sums[name]))
            for name, described in self._described.items()
        }


def digest(tensor: Tensor) -> TensorDigest:
    """Digest one tensor, and wait for it."""
    stream = StreamDigest()
    stream.add("", tensor)
    return stream.fetch()[""]


def bit_view(tensor: Tensor) -> Tensor:
    """Return the elements' bit patterns as integers, flat: NaN equals itself, -0.0 differs from 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(integers(tensor.dtype))


def integers(dtype: torch.dtype) -> torch.dtype:
    """Return the integers of a dtype's size."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def send_with_manifest(
    weights: Iterable[tuple[str, Tensor]], reply_to: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield an announcement, the stream unchanged, then the manifest as a uint8 tensor of JSON.

    The receiver's report goes to the file `reply_to`, on a file system that both sides see.
    """
    yield ANNOUNCEMENT_NAME, torch.empty(0, dtype=torch.uint8)  # no bytes: it moves no tensor in the buffer
    digests = StreamDigest()
    for name, tensor in weights:
        digests.add(name, tensor)
        yield name, tensor
    content = {"tensors": {name: asdict(digest) for name, digest in digests.fetch().items()}, "reply_to": reply_to}
    yield MANIFEST_NAME, torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def read_manifest(tensor: Tensor) -> tuple[dict[str, TensorDigest], str | None]:
    """Return the digests by name, and the file for the receiver's report, that `send_with_manifest` sent."""
    content = json.loads(tensor.cpu().numpy().tobytes())
    return {name: TensorDigest(**fields) for name, fields in content["tensors"].items()}, content["reply_to"]


def digest_of_all(digests: dict[str, TensorDigest]) -> int:
    """Return 40 bits of all digests, which a metric holds exactly; of equal weights, equal in whatever order."""
    text = json.dumps({name: asdict(digest) for name, digest in digests.items()}, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big")


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


def rounded_on_the_way(received: dict[str, torch.dtype], rollout_dtype: torch.dtype) -> list[str]:
    """Return one line for each tensor that arrived with fewer bits of mantissa than the rollout holds.

    8-bit floats, which only quantised rollouts get, are allowed.
    """
    problems, rollout = [], dtype_name(rollout_dtype)
    for name, dtype in sorted(received.items()):
        if dtype.is_floating_point and dtype.itemsize > 1 and torch.finfo(dtype).eps > torch.finfo(rollout_dtype).eps:
            problems.append(f"{name}: arrived in {dtype_name(dtype)}, too coarse for a rollout in {rollout}")
    return problems


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int64 words, flat: a view, but for the few tensors where bytes are missing."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        octets = nn.functional.pad(octets, (0, -octets.numel() % 8))
    return octets.view(torch.int64)


def _weights(device: torch.device) -> Tensor:
    """Return what the halves of the columns are multiplied by, low half before high: for each sum a row."""
    order = torch.arange(1, 2 * _PERIOD + 1, device=device)
    return torch.stack([torch.where(order % 2 == 1, 1, 2**32), order])
