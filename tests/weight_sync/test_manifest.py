"""The digest sees every bit; the manifest names every tensor that did not arrive."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import (
    MANIFEST_NAME,
    TensorDigest,
    differences,
    digest,
    read_manifest,
    rounded_on_the_way,
    send_with_manifest,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


def test_by_hand():
    """int32 elements 1, 2, 3: plain = 6, weighted = 1*1 + 2*2 + 3*3 = 14."""
    assert digest(torch.tensor([1, 2, 3], dtype=torch.int32)) == TensorDigest("int32", [3], plain=6, weighted=14)
    assert digest(torch.empty(0, 4)) == TensorDigest("float32", [0, 4], plain=0, weighted=0)


@pytest.mark.parametrize("period", [5, 13, 65521])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_its_formula_however_it_is_computed(dtype, period, monkeypatch):
    monkeypatch.setattr(manifest, "_PERIOD", period)
    monkeypatch.setattr(manifest, "_ROWS", 2)
    tensor = (torch.randn(7, 13) * 10).to(dtype)
    bits = manifest.bit_view(tensor).tolist()
    plain, weighted = sum(bits) % 2**64, sum((1 + i % period) * bit for i, bit in enumerate(bits)) % 2**64
    assert digest(tensor) == TensorDigest(str(dtype)[6:], [7, 13], plain, weighted)
    assert digest(tensor.t().contiguous().t()) == digest(tensor), "memory layout does not matter"


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
    *sent, (name, tensor) = send_with_manifest(iter(weights), reply_to="/a/file")
    assert [tensor is original for (_, tensor), (_, original) in zip(sent, weights, strict=True)] == [True, True]
    assert name == MANIFEST_NAME and tensor.dtype == torch.uint8
    assert read_manifest(tensor) == ({name: digest(tensor) for name, tensor in weights}, "/a/file")


def test_differences_name_the_tensor_and_what_happened():
    a, b = torch.randn(4), torch.randn(4)
    sent = {"same": digest(a), "changed": digest(a), "cast": digest(a), "lost": digest(a)}
    received = {"same": digest(a), "changed": digest(b), "cast": digest(a.bfloat16()), "extra": digest(a)}
    assert differences(sent, received) == [
        "cast: sent as float32[4], arrived as bfloat16[4]",
        "changed: float32[4] arrived with other values",
        "extra: received, but the trainer did not send it",
        "lost: sent by the trainer, never received",
    ]


@pytest.mark.parametrize(
    ("sent", "exact", "rounded"),
    [
        ("float32", ("float16", "bfloat16", "float32"), ()),
        ("float16", ("float16", "bfloat16"), ("float32",)),
        ("bfloat16", ("bfloat16",), ("float16", "float32")),
        ("float8_e4m3fn", ("float16",), ()),  # quantised
        ("int64", ("float16",), ()),
    ],
)
def test_weights_with_fewer_bits_than_the_rollout_holds_are_named(sent, exact, rounded):
    digests = {"a.weight": digest(torch.zeros(2)), "b": TensorDigest(sent, [2], 0, 0)}
    for rollout in (*exact, *rounded):
        named = [f"b: arrived in {sent}, too coarse for a rollout in {rollout}"] if rollout in rounded else []
        assert rounded_on_the_way(digests, getattr(torch, rollout)) == named
