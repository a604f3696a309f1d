"""The digest sees every bit; the manifest names every tensor that did not arrive."""

import itertools
import json
import struct

import pytest
import torch
from digests import digest
from torch.utils._python_dispatch import TorchDispatchMode

from verl_precision.base.errors import WeightSyncError
from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import TensorDigest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]
ROW = manifest._ROW
WEIGHTS = manifest._weights().long().tolist()  # of a row's digits, for each sum


def _by_the_formula(tensor: torch.Tensor) -> TensorDigest:
    """Word for word as `TensorDigest` says, in Python's numbers."""
    octets = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    digits = struct.iter_unpack("<i", octets + bytes(-len(octets) % 4))
    sums = [0] * 4
    for place, (digit,) in enumerate(digits):
        power = pow(manifest._BASE, place // ROW, 2**64)
        sums = [one + power * weight * digit for one, weight in zip(sums, WEIGHTS[place % ROW], strict=True)]
    signed = [(one + 2**63) % 2**64 - 2**63 for one in sums]
    return TensorDigest(str(tensor.dtype)[6:], list(tensor.shape), signed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_its_formula_in_whatever_pieces_and_company_it_is_computed(dtype, device, monkeypatch):
    if device == "cuda":  # an accelerator's pieces, on a CPU
        monkeypatch.setattr(manifest, "_PIECES", {"cpu": (256, 2048)})
    shapes = [(7, 13), (0, 4), (ROW,), (3 * ROW + 1,), (20 * ROW,), (), (65 * ROW + 5,)]
    tensors = {str(shape): (torch.randn(shape) * 1000).to(dtype) for shape in shapes}
    stream = manifest.StreamDigest()
    for name, tensor in tensors.items():
        stream.add(name, tensor)
    found = stream.fetch()
    assert found == {name: _by_the_formula(tensor) for name, tensor in tensors.items()}
    square = tensors["(7, 13)"]
    assert digest(square.t().contiguous().t()) == found["(7, 13)"], "memory layout does not matter"


def test_what_the_weights_promise():
    """For two digits that change places: see `TensorDigest`."""
    weights = torch.tensor(WEIGHTS)
    assert weights.shape == (ROW, 4) and (weights[:, 0] % 2 != 0).all() and 0 < weights.abs().min()
    assert weights.abs().max() * ROW * 2**31 < 2**53, "float64 holds every sum of a row"
    assert [len(set(column)) for column in weights.t().tolist()] == [ROW] * 4
    a, b = weights[:, None, :], weights[None, :, :]
    proportional = torch.ones(ROW, ROW, dtype=torch.bool)
    for i, j in itertools.combinations(range(4), 2):
        proportional &= a[..., i] * b[..., j] == a[..., j] * b[..., i]
    assert torch.equal(proportional, torch.eye(ROW, dtype=torch.bool))
    assert manifest._BASE % 8 == 5


def test_any_two_digits_that_change_places_show():
    """200,000 pairs in tensors of up to 16 TiB, at distances that are powers of two too, with one differing bit."""
    count, size = 200_000, 2**42
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randint(size, (2, count), generator=generator)
    near = one ^ (1 << torch.randint(42, (count,), generator=generator))
    two = torch.where(torch.arange(count) % 2 == 0, near, two)
    keep = one != two
    difference = 1 << torch.randint(32, (count,), generator=generator)

    def coefficients(places: torch.Tensor) -> torch.Tensor:
        power, square, rows = torch.ones_like(places), manifest._BASE, places // ROW
        for bit in range(31):
            power = torch.where(rows >> bit & 1 == 1, power * square, power)
            square = (square * square + 2**63) % 2**64 - 2**63
        return power[:, None] * torch.tensor(WEIGHTS)[places % ROW]

    moved = (coefficients(one) - coefficients(two)) * difference[:, None]
    assert (moved != 0).any(1)[keep].all()


SPARSE = torch.zeros(256, 2048)  # rows that have one number each
SPARSE[torch.arange(256), torch.arange(256) * 8 + 7] = 2.0


def _signs(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1


def _exchanged(tensor: torch.Tensor, one: int, two: int, size: int = 1) -> torch.Tensor:
    """Exchange two slices of the first dimension."""
    moved = tensor.clone()
    moved[one : one + size], moved[two : two + size] = tensor[two : two + size], tensor[one : one + size]
    return moved


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("tensor", "moved"), [
    *((torch.randn(8192, 64), lambda t, one=one: _exchanged(t, one, one + 4093)) for one in (0, 5)),
    (torch.randn(8192, 64), lambda t: torch.cat([t[4093:], t[:4093]])),
    (torch.randn(4, 4093 * 8), lambda t: _exchanged(t, 0, 1)),  # experts
    (torch.randn(8, 4096, 16), lambda t: _exchanged(t, 0, 4, 4)),  # shards
    (torch.randn(8, 4096, 16), lambda t: t.roll(1, 0)),
    (torch.randn(64, 4093), lambda t: t.t().contiguous().view(64, 4093)),
    *((torch.randn(1 << 20), lambda t, by=by: _exchanged(t, 0, by)) for by in (1, 4 * 4093, 1 << 19)),
    (_signs(1 << 18), lambda t: _exchanged(t, *torch.stack([(t < 0).nonzero()[-1], (t > 0).nonzero()[0]]).flatten())),
    *((_signs(8192, 64), lambda t, by=by: _exchanged(t, 0, by)) for by in (4096, 4093)),
    (SPARSE, lambda t: _exchanged(t, 0, 128)),  # as an identity: sums of rows and columns stay
    (2 * torch.eye(1024), lambda t: _exchanged(t, 3, 515)),
    (torch.ones(1 << 18), lambda t: t * torch.where(torch.arange(1 << 18) % (4 * 4093) == 7, -1, 1)),
])  # fmt: skip
def test_what_moves_shows(tensor, moved, dtype):
    tensor = tensor.to(dtype)
    assert not torch.equal(tensor, moved(tensor))
    assert digest(tensor) != digest(moved(tensor))


@pytest.mark.parametrize("offset", range(4))
def test_where_a_tensor_lies_in_a_buffer_does_not_matter(offset):
    """verl aligns a tensor in its transfer buffer to the size of an element only."""
    tensor = torch.randn(3000, 7).half()
    buffer = torch.cat([tensor.new_zeros(offset), tensor.flatten()])
    assert digest(buffer[offset:].view(tensor.shape)) == digest(tensor)


class _Reads(TorchDispatchMode):
    """Counts the bytes of a tensor that operations read, views aside."""

    def __init__(self, tensor):
        super().__init__()
        self.memory, self.octets, self.operations = tensor.untyped_storage().data_ptr(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.operations += 1
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            self.octets += sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() == self.memory)
        return result


def test_each_tensor_is_read_once_and_nothing_waits_for_the_device():
    """And its memory may be used again once it was added: the transfer buffer's is."""
    for tensor in (torch.randn(600_000), torch.randn(64, 64)):
        stream, expected = manifest.StreamDigest(), digest(tensor)
        stream.add("before", torch.randn(64, 64))
        with _Reads(tensor) as reads:
            stream.add("this", tensor)
        assert reads.octets == tensor.nbytes
        tensor.zero_()
        assert stream.fetch()["this"] == expected
    assert reads.operations <= 2, "of a small tensor one kernel on an accelerator"
    with torch.device("meta"):  # has no values: to ask for one is an error
        manifest.StreamDigest().add("no values", torch.randn(50_000))


def test_stream_is_unchanged_and_closed_by_the_manifest():
    weights = [("a", torch.randn(3)), ("b", torch.randn(2, 2).half())]
    (first, announcement), *sent, (name, tensor) = manifest.send_with_manifest(iter(weights), reply_to="/a/file")
    assert announcement.nbytes == 64, "verl's engines leave out what is empty; no tensor loses its alignment"
    assert [tensor is original for (_, tensor), (_, original) in zip(sent, weights, strict=True)] == [True, True]
    assert (first, name, tensor.dtype) == (manifest.ANNOUNCEMENT_NAME, manifest.MANIFEST_NAME, torch.uint8)
    assert manifest.read_manifest(tensor) == ({name: digest(tensor) for name, tensor in weights}, "/a/file")


def test_all_ranks_have_a_manifest_of_one_size():
    sizes = {len([*manifest.send_with_manifest(iter([("a", value * torch.ones(9))]))][-1][1]) for value in (0, 1, 7e8)}
    assert len(sizes) == 1


@pytest.mark.parametrize("version", [None, manifest.VERSION + 1])
def test_a_manifest_of_another_version_is_refused(version):
    content = {"tensors": {"a": {"dtype": "float32", "shape": [3], "plain": 1, "weighted": 2}}, "reply_to": None}
    content |= {"version": version} if version else {}
    with pytest.raises(WeightSyncError, match=f"has version {version or 1}, and this rollout reads version 2: install"):
        manifest.read_manifest(torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8))


def test_differences_name_the_tensor_and_what_happened():
    a, b = torch.randn(4), torch.randn(4)
    sent = dict.fromkeys(("same", "changed", "cast", "lost"), digest(a))
    received = {"same": digest(a), "changed": digest(b), "cast": digest(a.bfloat16()), "extra": digest(a)}
    assert manifest.differences(sent, received) == [
        "cast: sent as float32[4], arrived as bfloat16[4]",
        "changed: float32[4] arrived with other values",
        "extra: received, but not sent by the trainer",
        "lost: sent by the trainer, but not received",
    ]


@pytest.mark.parametrize(("sent", "exact", "rounded"), [
    ("float32", ("float16", "bfloat16", "float32"), ()),
    ("float16", ("float16", "bfloat16"), ("float32",)),
    ("bfloat16", ("bfloat16",), ("float16", "float32")),
    ("float8_e4m3fn", ("float16",), ()),  # quantised
    ("int64", ("float16",), ()),
])  # fmt: skip
def test_weights_with_fewer_bits_than_the_rollout_holds_are_named(sent, exact, rounded):
    received = {"a.weight": torch.float32, "b": getattr(torch, sent)}
    for rollout in (*exact, *rounded):
        named = [f"b: arrived in {sent}, which has fewer bits than the {rollout} rollout"] if rollout in rounded else []
        assert manifest.rounded_on_the_way(received, getattr(torch, rollout)) == named
