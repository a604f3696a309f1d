"""The digest sees every bit; the manifest names every tensor that did not arrive."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import TensorDigest, digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


def test_by_hand():
    """Halves of int32 elements 1, 2, 3: l0 = 1, h0 = 2, l1 = 3; plain = 1 + 2·2³² + 3, weighted = 1·1 + 2·2 + 3·3."""
    assert digest(torch.tensor([1, 2, 3], dtype=torch.int32)) == TensorDigest("int32", [3], 4 + 2**33, 14)
    assert digest(torch.empty(0, 4)) == TensorDigest("float32", [0, 4], plain=0, weighted=0)


@pytest.mark.parametrize("period", [5, 13, 4093])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 13), (11, 16)])
def test_the_digest_is_its_formula_however_it_is_computed(shape, dtype, period, monkeypatch):
    monkeypatch.setattr(manifest, "_PERIOD", period)
    tensor = (torch.randn(*shape) * 10).to(dtype)
    octets = bytes(tensor.view(torch.uint8).flatten().tolist())
    octets += bytes(-len(octets) % 8)
    columns = [0] * period
    for i, (word,) in enumerate(struct.iter_unpack("<Q", octets)):
        columns[i % period] = (columns[i % period] + word) % 2**64
    halves = [half for column in columns for half in struct.unpack("<ii", column.to_bytes(8, "little"))]
    plain = sum(low + 2**32 * high for low, high in zip(halves[::2], halves[1::2], strict=True)) % 2**64
    weighted = sum(i * half for i, half in enumerate(halves, start=1)) % 2**64
    assert digest(tensor) == TensorDigest(str(dtype)[6:], list(shape), plain, weighted)
    assert digest(tensor.t().contiguous().t()) == digest(tensor), "memory layout does not matter"


@pytest.mark.parametrize("offset", range(9))
def test_where_a_tensor_lies_in_a_buffer_does_not_matter(offset):
    """verl aligns a tensor in its transfer buffer to the size of an element only."""
    tensor = torch.randn(3000, 7).half()
    buffer = torch.zeros(offset + tensor.numel(), dtype=torch.float16)
    buffer[offset:] = tensor.flatten()
    assert digest(buffer[offset:].view(tensor.shape)) == digest(tensor)


class _Reads(TorchDispatchMode):
    """Counts the operations that read a tensor of at least so many bytes, views aside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.operations = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and any(isinstance(one, torch.Tensor) and one.nbytes >= self.size for one in args):
            self.operations.append(str(function))
        return result


def test_each_tensor_is_read_once_and_nothing_waits_for_the_device():
    stream, tensor = manifest.StreamDigest(), torch.randn(600_000)
    with _Reads(tensor.nbytes // 2) as reads:
        stream.add("large", tensor)
    assert len(reads.operations) == 1, reads.operations
    with _Reads(0) as all_operations:
        stream.add("again", tensor)
    assert len(all_operations.operations) <= 4, "kernels a tensor on an accelerator"
    with torch.device("meta"):  # has no values: to ask for one is an error
        manifest.StreamDigest().add("no values", torch.randn(5000))


def test_swapped_words_that_differ_in_the_highest_bit_only_show():
    words = torch.randint(2**62, (9000,), generator=torch.Generator().manual_seed(0))
    words[2] = words[0] ^ -(2**63)  # an even distance, times 2⁶³, is 0 mod 2⁶⁴
    swapped = words.clone()
    swapped[[0, 2]] = words[[2, 0]]
    assert digest(swapped) != digest(words)


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(0, 10**6), st.integers(0, 15), st.sampled_from(DTYPES[:3]))
def test_one_flipped_bit_or_a_changed_order_shows(size, seed, bit, dtype):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    damaged = tensor.clone()
    damaged.view(torch.int16)[seed % size] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert digest(damaged) != digest(tensor)
    if not torch.equal(tensor.flip(0), tensor):
        assert digest(tensor.flip(0)) != digest(tensor)


def test_nan_equals_itself_and_minus_zero_differs():
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_stream_is_unchanged_and_closed_by_the_manifest():
    weights = [("a", torch.randn(3)), ("b", torch.randn(2, 2).half())]
    (first, announcement), *sent, (name, tensor) = manifest.send_with_manifest(iter(weights), reply_to="/a/file")
    assert announcement.nbytes == 0, "no tensor lies elsewhere in the buffer for it"
    assert [tensor is original for (_, tensor), (_, original) in zip(sent, weights, strict=True)] == [True, True]
    assert (first, name, tensor.dtype) == (manifest.ANNOUNCEMENT_NAME, manifest.MANIFEST_NAME, torch.uint8)
    assert manifest.read_manifest(tensor) == ({name: digest(tensor) for name, tensor in weights}, "/a/file")


def test_differences_name_the_tensor_and_what_happened():
    a, b = torch.randn(4), torch.randn(4)
    sent = {"same": digest(a), "changed": digest(a), "cast": digest(a), "lost": digest(a)}
    received = {"same": digest(a), "changed": digest(b), "cast": digest(a.bfloat16()), "extra": digest(a)}
    assert manifest.differences(sent, received) == [
        "cast: sent as float32[4], arrived as bfloat16[4]",
        "changed: float32[4] arrived with other values",
        "extra: received, but the trainer did not send it",
        "lost: sent by the trainer, never received",
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
        named = [f"b: arrived in {sent}, too coarse for a rollout in {rollout}"] if rollout in rounded else []
        assert manifest.rounded_on_the_way(received, getattr(torch, rollout)) == named
