"""The digest sees every bit; the manifest names every tensor that did not arrive."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorDigest,
    decode,
    differences,
    digest,
    encode,
    rounded_on_the_way,
    send_with_manifest,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


def test_hand_computed():
    """int32 elements 1, 2, 3: plain = 6, weighted = 1*1 + 2*2 + 3*3 = 14."""
    d = digest(torch.tensor([1, 2, 3], dtype=torch.int32))
    assert (d.plain, d.weighted, d.shape, d.dtype) == (6, 14, (3,), "torch.int32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_equal_digest_any_chunk(dtype, monkeypatch):
    tensor = (torch.randn(7, 13) * 10).to(dtype)
    whole = digest(tensor)
    assert digest(tensor.clone()) == whole
    assert digest(tensor.t().contiguous().t()) == whole, "memory layout does not matter"
    monkeypatch.setattr(manifest, "_CHUNK", 5)
    assert digest(tensor) == whole


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(0, 10**6), st.sampled_from(DTYPES[:3]))
def test_one_flipped_bit_or_one_swap_shows(size, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(size, generator=generator).to(dtype)
    index = seed % size
    damaged = tensor.clone()
    bits = damaged.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[index] ^= 1
    assert digest(damaged) != digest(tensor)
    swapped = tensor.flip(0)
    if not torch.equal(swapped, tensor):
        assert digest(swapped) != digest(tensor)


def test_nan_equals_itself_and_minus_zero_differs():
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_empty_tensor():
    assert (digest(torch.empty(0, 4)).plain, digest(torch.empty(0, 4)).shape) == (0, (0, 4))


def test_stream_is_unchanged_and_closed_by_the_manifest():
    weights = [("a", torch.randn(3)), ("b", torch.randn(2, 2).half())]
    sent = list(send_with_manifest(iter(weights)))
    assert all(x is y for (_, x), (_, y) in zip(sent, weights, strict=False))
    name, tensor = sent[-1]
    assert name == MANIFEST_NAME and tensor.dtype == torch.uint8
    assert decode(tensor).tensors == {n: digest(t) for n, t in weights}
    assert decode(encode(Manifest({}))).tensors == {}


def test_differences_name_the_tensor_and_what_happened():
    a, b = torch.randn(4), torch.randn(4)
    sent = {"same": digest(a), "changed": digest(a), "cast": digest(a), "lost": digest(a)}
    received = {"same": digest(a), "changed": digest(b), "cast": digest(a.bfloat16()), "extra": digest(a)}
    assert differences(sent, received) == [
        "cast: sent as torch.float32[4], arrived as torch.bfloat16[4]",
        "changed: torch.float32[4] arrived with other values",
        "extra: received, but the trainer did not send it",
        "lost: sent by the trainer, never received",
    ]
    assert differences(sent, dict(sent)) == []


@pytest.mark.parametrize(
    ("sent", "rollout", "rounded"),
    [
        (torch.float32, torch.float16, False),
        (torch.float32, torch.float32, False),
        (torch.float16, torch.float16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float8_e4m3fn, torch.float16, False),
        (torch.int64, torch.float16, False),
    ],
)
def test_weights_with_fewer_bits_than_the_rollout_holds_are_named(sent, rollout, rounded):
    digests = {"a.weight": digest(torch.zeros(2)), "b": TensorDigest(str(sent), (2,), 0, 0)}
    found = rounded_on_the_way(digests, rollout)
    assert bool(found) is rounded
    if rounded:
        assert found == [f"b: arrived in {str(sent)[6:]}, too coarse for a rollout in {str(rollout)[6:]}"]
