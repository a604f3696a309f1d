"""The manifest: a digest of every tensor that the trainer sends. It is the last item of the weight stream.

The digest depends on bits, not values: one different rounding changes the digest, and NaN equals itself. A digest is a
set of weighted sums of whole numbers, computed without rounding, so it does not depend on the device, or on the pieces
in which it is computed. The sums stay on the device and are fetched together, so that nothing waits for the device
while weights are sent.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor, nn

from verl_precision.base.errors import WeightSyncError

Weights = Iterator[tuple[str, Tensor]]  # a weight stream: names and tensors
VERSION = 2  # of the manifest; both sides must have the same
ANNOUNCEMENT_NAME = "__verl_precision_manifest_follows__"  # the stream's first item; without it: no digests
MANIFEST_NAME = "__verl_precision_manifest__"
# Texts in the lines about tensors; the self-test finds its planted faults by them.
NOT_RECEIVED, OTHER_VALUES = "sent by the trainer, but not received", "arrived with other values"
FEWER_BITS = "which has fewer bits than the"

_LONGEST = len(str(-(2**63)))  # characters of a sum
_ROW = 2048  # digits; with weights below 2¹¹ a row's sum stays below 2⁵³, so float64 holds it exactly
_SUMS = 4
# Rows that wait, few enough for one thread of a CPU (threads that wait for each other are slow on busy cores), and rows
# of the table, which takes a large tensor in pieces.
_PIECES = {"cpu": (15, 512)}
_BASE = 0x5851F42D4C957F2D  # g; 5 mod 8, so that g^r are 2⁶² different numbers mod 2⁶⁴


@dataclass(frozen=True)
class TensorDigest:
    """Dtype, shape and four sums over the tensor's bytes.

    The bytes, filled up with zeros, are read as signed digits d of 32 bits, in rows of 2,048. Sum k is Σ gʳ·w(k, c)·d
    mod 2⁶⁴ over the columns c of all rows r. The weights w are whole numbers between -2047 and 2047, none of them 0 and
    none twice in a sum; in the first sum they are odd, and no two columns have proportional weights.

    So one changed digit changes the digest with certainty, as do any two elements of up to 32 bits that change places,
    in a tensor of up to 16 TiB. Moves of more elements at once (rows, experts, shards) are missed with a chance of
    about 2⁻⁴⁷, (2048·4094³)⁻¹, if the weights and the data are independent.
    """

    dtype: str  # without "torch."
    shape: list[int]
    sums: list[int]  # mod 2⁶⁴, signed


class StreamDigest:
    """The digests of a stream of tensors: `add` only queues work on the device, `fetch` waits for it."""

    def __init__(self) -> None:
        self._described: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._rows: dict[torch.device, _RowSums] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest a tensor's bits (no DTensor): equal for equal bits, dtype and shape, on every device."""
        digits = _digits(tensor)
        if digits.device not in self._rows:
            self._rows[digits.device] = _RowSums(digits.device)
        self._described[name] = tensor.dtype, tensor.shape
        self._rows[digits.device].add(name, digits)

    def fetch(self) -> dict[str, TensorDigest]:
        """Return name -> digest of the tensors so far, in their order."""
        sums = {name: found for rows in self._rows.values() for name, found in rows.fetch().items()}
        described = self._described.items()
        return {name: TensorDigest(dtype_name(dtype), list(shape), sums[name]) for name, (dtype, shape) in described}


class _RowSums:
    """Sums of tensors on one device. Rows wait in a table until it is full, so that small tensors share products."""

    def __init__(self, device: torch.device) -> None:
        self._waiting, self._capacity = _PIECES.get(device.type, (256, 2048))
        self._table = torch.empty(self._capacity * _ROW, dtype=torch.float64, device=device)
        self._powers = torch.ones(1, 1, dtype=torch.int64, device=device)  # g^r, as many as were needed
        self._weights = _weights().to(device)
        self._names: list[str] = []
        self._sums: list[Tensor] = []  # of the tensors with these names, in this order
        self._rows: list[int] = []  # of the tensors in the table
        self._used = 0  # rows of the table

    def add(self, name: str, digits: Tensor) -> None:
        """Add the digits of a tensor."""
        rows = -(-digits.numel() // _ROW)
        if self._used + rows > self._waiting:
            self._flush()
        self._names.append(name)
        if rows > self._waiting:
            parts = [self._products(self._fill(0, part)) for part in digits.split(self._capacity * _ROW)]
            self._sums.append((torch.cat(parts) * self._powers_of(rows)).sum(0, keepdim=True))
        else:
            self._rows.append(rows)
            self._used = self._fill(self._used, digits)

    def fetch(self) -> dict[str, list[int]]:
        """Return name -> sums mod 2⁶⁴, signed."""
        self._flush()
        return dict(zip(self._names, torch.cat(self._sums).tolist(), strict=True))

    def _fill(self, row: int, digits: Tensor) -> int:
        """Write digits into the table from a row on, and zeros to the end of the last row; return the next row."""
        end = row * _ROW + digits.numel()
        self._table[row * _ROW : end].copy_(digits)
        behind = -(-end // _ROW)
        if end % _ROW:
            self._table[end : behind * _ROW].zero_()
        return behind

    def _products(self, rows: int) -> Tensor:
        """Return the sums of each of the table's first rows."""
        table = self._table[: rows * _ROW].view(rows, _ROW)
        # `out`, because the replacement of aten::mm in some engines (vLLM's batch invariance) does not support float64.
        return torch.mm(table, self._weights, out=table.new_empty(rows, _SUMS)).long()

    def _flush(self) -> None:
        """Sum up the tensors in the table and empty it."""
        if not self._rows:
            return
        place = [(number, row) for number, rows in enumerate(self._rows) for row in range(rows)]
        number, row = torch.tensor(place, dtype=torch.int64, device=self._table.device).view(-1, 2).unbind(1)
        products = self._products(self._used) * self._powers_of(max(self._rows))[row]
        self._sums.append(products.new_zeros(len(self._rows), _SUMS).index_add_(0, number, products))
        self._rows, self._used = [], 0

    def _powers_of(self, rows: int) -> Tensor:
        while len(self._powers) < rows:
            step = pow(_BASE, len(self._powers), 2**64)
            self._powers = torch.cat([self._powers, self._powers * (step - (step >> 63 << 64))])
        return self._powers[:rows]


def bit_view(tensor: Tensor) -> Tensor:
    """Return the elements' bit patterns as integers, flat: NaN equals itself, -0.0 differs from 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(integers(tensor.dtype))


def integers(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype of a dtype's size."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def send_with_manifest(weights: Weights, reply_to: str | None = None) -> Weights:
    """Yield an announcement, the unchanged stream, and the manifest as uint8; the rollout answers in `reply_to`."""
    # With bytes, because verl's engines leave out empty tensors; so many that other tensors stay aligned.
    yield ANNOUNCEMENT_NAME, torch.zeros(64, dtype=torch.uint8)
    digests = StreamDigest()
    for name, tensor in weights:
        digests.add(name, tensor)
        yield name, tensor
    found = digests.fetch()
    tensors = {name: asdict(digest) for name, digest in found.items()}
    text = json.dumps({"version": VERSION, "tensors": tensors, "reply_to": reply_to})
    # One size for all ranks, whatever their numbers: in verl's nccl each reckons where the buckets of rank 0 end.
    shorter = sum(_LONGEST - len(str(number)) for digest in found.values() for number in digest.sums)
    yield MANIFEST_NAME, torch.frombuffer(bytearray((text + " " * shorter).encode()), dtype=torch.uint8)


def read_manifest(tensor: Tensor) -> tuple[dict[str, TensorDigest], str | None]:
    """Return the digests by name, and the file for the receiver's report, that `send_with_manifest` sent."""
    content = json.loads(tensor.cpu().numpy().tobytes())
    if (version := content.get("version", 1)) != VERSION:
        problem = f"the trainer's manifest has version {version}, and this rollout reads version {VERSION}"
        raise WeightSyncError(f"{problem}: install the same verl-precision on both sides")
    return {name: TensorDigest(**fields) for name, fields in content["tensors"].items()}, content["reply_to"]


def digest_of_all(digests: dict[str, TensorDigest]) -> int:
    """Return 40 bits of all digests, which a metric holds exactly; independent of the order of tensors."""
    text = json.dumps({name: asdict(digest) for name, digest in digests.items()}, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big")


def differences(sent: dict[str, TensorDigest], received: dict[str, TensorDigest]) -> list[str]:
    """Return one line for each tensor that did not arrive as it was sent."""
    problems = []
    for name in sorted(sent.keys() | received.keys()):
        a, b = sent.get(name), received.get(name)
        if a is None:
            problems.append(f"{name}: received, but not sent by the trainer")
        elif b is None:  # most of verl's checkpoint engines leave out an empty tensor
            problems += [] if 0 in a.shape else [f"{name}: {NOT_RECEIVED}"]
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            problems.append(f"{name}: sent as {a.dtype}{a.shape}, arrived as {b.dtype}{b.shape}")
        elif a != b:
            problems.append(f"{name}: {a.dtype}{a.shape} {OTHER_VALUES}")
    return problems


def rounded_on_the_way(received: dict[str, torch.dtype], rollout_dtype: torch.dtype) -> list[str]:
    """Return one line for each tensor with fewer bits of mantissa than the rollout has; 8-bit tensors are left out."""
    problems, rollout = [], dtype_name(rollout_dtype)
    for name, dtype in sorted(received.items()):
        if dtype.is_floating_point and dtype.itemsize > 1 and torch.finfo(dtype).eps > torch.finfo(rollout_dtype).eps:
            problems.append(f"{name}: arrived in {dtype_name(dtype)}, {FEWER_BITS} {rollout} rollout")
    return problems


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _digits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int32 digits, flat; a view, except for the few tensors that need padding."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.nbytes % 4 or flat.storage_offset() * flat.itemsize % 4:
        octets = flat.view(torch.uint8)
        flat = nn.functional.pad(octets, (0, -octets.numel() % 4))
    return flat.view(torch.int32)


@cache
def _weights() -> Tensor:
    """Return the weights of a row's digits, float64 [2048, 4]: each sum has its own numbers, in the order of hashes."""
    odd, every = range(1 - _ROW, _ROW, 2), [*range(1 - _ROW, 0), *range(1, _ROW)]
    columns = [
        sorted(numbers, key=lambda number: hashlib.sha256(f"{column} {number}".encode()).digest())[:_ROW]
        for column, numbers in enumerate([odd, every, every, every])
    ]
    return torch.tensor(columns, dtype=torch.float64, device="cpu").t().contiguous()
