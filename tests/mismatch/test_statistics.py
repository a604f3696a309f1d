"""Every `mismatch/...` metric equals plain float64 numpy, however the batch is cut, and whatever it holds."""

import functools
import math

import numpy as np
import plain_statistics
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import assert_close, jagged, padded, random_responses
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.histogram import absolute, bit_counts, gap_counts, gap_edges, quantile
from verl_precision.mismatch.statistics import MismatchSums


def measured(responses, chunk_tokens=None, mask=None, **layout):
    tensors, valid = padded(responses, **layout)
    sums = MismatchSums()
    sums.update(
        tensors["trainer"], tensors["rollout"], valid if mask is None else mask, tensors["advantage"], chunk_tokens
    )
    return sums


def test_hand_computed():
    """π = (1/2, 1/4), μ = (1/4, 1/2): g = ±ln 2; k3 = ((2 - ln 2 - 1) + (1/2 + ln 2 - 1)) / 2 = 1/4;
    total variation = (|2 - 1| + |1/2 - 1|) / 2 / 2 = 3/8; the response's ratio is 1."""
    mu, pi = torch.tensor([[0.25, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    sums = MismatchSums()
    sums.update(pi, mu, torch.ones(1, 2), torch.tensor([1.0]))
    expected = {
        "log_prob_gap_abs_mean": math.log(2),
        "log_prob_gap_std": math.log(2),
        "k3_kl": 0.25,
        "total_variation": 0.375,
        "probs_diff_abs_mean": 0.25,
        "probs_diff_min": -0.25,
        "probs_diff_max": 0.25,
        "probs_pearson": -1,
        "sequence_ess": 1,
        "sequence_ratio_within_c": 1,
        "prob_1e-1_1/token_fraction": 1,
    }
    found = sums.metrics()
    for name, value in expected.items():
        assert found[f"mismatch/{name}"] == pytest.approx(value, rel=1e-6), name
    for name in ("log_prob_gap_mean", "k1_kl", "sequence_log_ratio_mean", "log_prob_gap_mean_positive_advantage"):
        assert found[f"mismatch/{name}"] == pytest.approx(0, abs=1e-7), name
    assert "mismatch/log_prob_gap_mean_negative_advantage" not in found
    assert "mismatch/sequence_log_ratio_abs_per_1k_tokens" not in found, "one length has no slope"


def test_effective_sample_size_and_shares_by_hand():
    """Ratios 4, 2, 1/2, 1/8: ESS = 6.625² / 20.265625 = 2.16577; C = 3: at most C 3 of 4, within [1/3, 3] 2 of 4."""
    pi = torch.tensor([[4.0], [2.0], [0.5], [0.125]]).log() - 3
    sums = MismatchSums(ratio_threshold=3.0)
    sums.update(pi, torch.full((4, 1), -3.0), torch.ones(4, 1))
    found = sums.metrics()
    assert found["mismatch/sequence_ess"] == pytest.approx(2.165767, rel=1e-6)
    assert found["mismatch/sequence_ess_fraction"] == pytest.approx(2.165767 / 4, rel=1e-6)
    assert found["mismatch/sequence_ratio_at_most_c"] == 0.75
    assert found["mismatch/sequence_ratio_within_c"] == 0.5


def test_growth_with_length_by_hand():
    """|s| = 1e-3 a token whatever its sign: 1 nat per 1,000 tokens."""
    mu, mask = torch.full((3, 300), -1.0, dtype=torch.float64), torch.arange(300) < torch.tensor([[100], [200], [300]])
    sums = MismatchSums()
    sums.update(mu + 1e-3 * torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64), mu, mask)
    assert sums.metrics()["mismatch/sequence_log_ratio_abs_per_1k_tokens"] == pytest.approx(1, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 3.0, 1000.0]),
    st.sampled_from([1, 7, 64, None]),
)
def test_equals_numpy_on_jagged_batches(rows, longest, seed, gap, chunk_tokens):
    responses = random_responses(rows, longest, seed, gap)
    expected = plain_statistics.mismatch(responses)
    assert_close(measured(responses, chunk_tokens).metrics(), expected)
    if rows:
        nested = jagged(responses)
        sums = MismatchSums()
        sums.update(nested["trainer"], nested["rollout"], None, nested["advantage"], chunk_tokens)
        assert_close(sums.metrics(), expected)


def test_equals_numpy_on_a_large_batch():
    responses = random_responses(200, 2000, seed=1)
    assert_close(measured(responses).metrics(), plain_statistics.mismatch(responses), tolerance=1e-9)


@pytest.mark.parametrize("chunk_tokens", [1, 500, 1999, 2000, 2001, 100_000, 10**9])
def test_chunk_size_changes_nothing(chunk_tokens):
    responses = random_responses(40, 1000, seed=2)
    whole = measured(responses)
    found = measured(responses, chunk_tokens)
    assert_close(found.metrics(), whole.metrics(), tolerance=1e-11)
    assert torch.equal(found.gap_histogram, whole.gap_histogram)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1000.0]))
def test_merged_micro_batches_are_the_whole(cuts, seed, gap):
    responses = random_responses(30, 20, seed, gap)
    edges = [0, *sorted(cuts), 30]
    pieces = [responses[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    states = [measured(piece).to_tensor() for piece in pieces]
    merged = functools.reduce(MismatchSums.merge, map(MismatchSums.from_tensor, states))
    assert_close(merged.metrics(), plain_statistics.mismatch(responses))
    one_object = MismatchSums()
    for piece in pieces:
        tensors, mask = padded(piece)
        one_object.update(tensors["trainer"], tensors["rollout"], mask, tensors["advantage"])
    assert_close(one_object.metrics(), merged.metrics(), tolerance=1e-11)


def test_state_travels_as_a_tensor():
    sums = measured(random_responses(5, 9, seed=3))
    state = sums.to_tensor()
    assert state.dtype == torch.float64 and state.dim() == 1
    assert torch.equal(MismatchSums.from_tensor(state).to_tensor(), state)
    with pytest.raises(ConfigurationError, match="to_tensor"):
        MismatchSums.from_tensor(state[:-1])
    with pytest.raises(ConfigurationError, match="ratio_threshold=3.*merged with ratio_threshold=2"):
        sums.merge(MismatchSums(ratio_threshold=2.0))
    with pytest.raises(ConfigurationError, match="ratio_threshold=0.5"):
        MismatchSums(ratio_threshold=0.5)


def test_two_gloo_ranks(tmp_path):
    """Each rank has half of the responses, in micro-batches of 3; gathered states give the metrics of the whole."""
    mp.start_processes(_one_rank, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    expected = plain_statistics.mismatch(random_responses(22, 50, seed=4))
    for rank in range(2):
        assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)


def _one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mine = random_responses(22, 50, seed=4)[rank::2]
    sums = MismatchSums()
    for start in range(0, len(mine), 3):
        tensors, mask = padded(mine[start : start + 3])
        sums.update(tensors["trainer"], tensors["rollout"], mask, tensors["advantage"])
    state = sums.to_tensor()
    gathered = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(gathered, state)
    merged = functools.reduce(MismatchSums.merge, map(MismatchSums.from_tensor, gathered))
    torch.save(merged.metrics(), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30, 5.0])
def test_masked_tokens_never_matter(junk):
    responses = random_responses(12, 30, seed=5)
    clean = measured(responses)
    assert torch.equal(measured(responses, junk=junk, width=64).to_tensor(), measured(responses, width=64).to_tensor())
    assert_close(measured(responses, junk=junk, width=64).metrics(), clean.metrics(), tolerance=1e-11)


def test_holes_in_the_mask():
    """Tool output between a response's turns is masked: the rest is one response."""
    (response,) = random_responses(1, 40, seed=6, shortest=40)
    keep = np.arange(40) % 3 != 0
    found = measured([response], mask=torch.tensor(keep[None]))
    expected = plain_statistics.mismatch([{name: values[keep] for name, values in response.items()}])
    assert_close(found.metrics(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_type_is_exact(dtype):
    responses = random_responses(6, 30, seed=7)
    for response in responses:
        for name in ("trainer", "rollout"):
            response[name] = torch.tensor(response[name]).to(dtype).double().numpy()
    assert_close(measured(responses, dtype=dtype).metrics(), plain_statistics.mismatch(responses))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e-3])
@pytest.mark.parametrize("name", ["trainer", "rollout"])
def test_bad_tokens_are_counted_and_left_out(bad, name):
    responses = random_responses(8, 20, seed=8, shortest=3)
    responses[2][name][1] = responses[5][name][0] = bad
    found = measured(responses).metrics()
    assert_close(found, plain_statistics.mismatch(responses))
    assert found["mismatch/nonfinite_tokens"] == (0 if bad == 1e-3 else 2)
    assert found["mismatch/positive_log_probs"] == (2 if bad == 1e-3 else 0)
    assert found["mismatch/responses"] == 6, "a response with a hole has no ratio"


COUNTS = {f"mismatch/{name}": 0 for name in ("tokens", "responses", "nonfinite_tokens", "positive_log_probs")}


def test_nothing_to_measure():
    for shape in ((0, 5), (3, 0), (0, 0), (3, 5)):
        sums = MismatchSums()
        sums.update(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), torch.zeros(shape))
        assert sums.metrics() == COUNTS
    sums.update(torch.full((2, 3), math.nan), torch.zeros(2, 3), torch.ones(2, 3))
    assert sums.metrics() == {**COUNTS, "mismatch/nonfinite_tokens": 6}


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_ratios_stay_finite(sign):
    """A gap of 1000 in one token, 30000 in a response: the ESS is 1, the ratio itself never formed."""
    pi, mu = torch.full((2, 30), -1.0), torch.full((2, 30), -1.0)
    (mu if sign > 0 else pi)[0] = -1001.0
    sums = MismatchSums()
    sums.update(pi, mu, torch.ones(2, 30))
    found = sums.metrics()
    assert all(map(math.isfinite, found.values()))
    assert found["mismatch/sequence_log_ratio_max"] == (30000 if sign > 0 else 0)
    assert found["mismatch/sequence_ess"] == 1
    assert found["mismatch/probs_diff_max" if sign > 0 else "mismatch/probs_diff_min"] == pytest.approx(sign / math.e)
    assert found["mismatch/k3_kl"] == pytest.approx((math.expm1(600) - 600) / 2 if sign > 0 else 999 / 2)


def test_identical_policies_and_constant_probabilities():
    mu = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    sums = MismatchSums()
    sums.update(mu, mu.clone(), torch.ones(3, 5))
    found = sums.metrics()
    for name, value in found.items():
        if "gap" in name or "kl" in name or "diff" in name:
            assert value == 0, name
    assert found["mismatch/probs_pearson"] == pytest.approx(1)
    assert found["mismatch/sequence_ess"] == 3
    constant = MismatchSums()
    constant.update(torch.full((2, 3), -0.3), torch.full((2, 3), -0.3), torch.ones(2, 3))
    assert "mismatch/probs_pearson" not in constant.metrics()


def test_tiny_gap_keeps_its_digits():
    """k3 of a gap of 1e-7 is 5e-15: e^g - g - 1 would be all rounding."""
    mu = torch.full((1, 1000), -1.0, dtype=torch.float64)
    sums = MismatchSums()
    sums.update(mu + 1e-7, mu, torch.ones(1, 1000))
    assert sums.metrics()["mismatch/k3_kl"] == pytest.approx(5e-15, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-5000, 5000, width=32), min_size=1, max_size=50),
    st.sampled_from([0.001, 0.01, 0.25, 0.5, 0.9, 0.999]),
)
def test_quantiles_are_within_a_sixteenth(values, q):
    gap = np.array(values)
    counts = gap_counts(bit_counts(torch.tensor(values, dtype=torch.float64)))
    assert counts.sum() == len(values)
    found = quantile(gap_edges(), counts, q, gap.min(), gap.max())
    exact = np.quantile(gap, q, method="inverted_cdf")
    if abs(exact) < 4096:
        assert abs(found - exact) <= max(abs(exact) / 16, 2**-29)
    else:
        assert abs(found) >= 4096
    exact = np.quantile(np.abs(gap), q, method="inverted_cdf")
    if exact < 4096:
        assert abs(quantile(*absolute(counts), q, 0.0, np.abs(gap).max()) - exact) <= max(exact / 16, 2**-29)


def test_histogram_holds_every_token():
    ((name, (edges, counts)),) = measured(random_responses(9, 30, seed=9)).histograms().items()
    assert name == "mismatch/log_prob_gap" and len(edges) == len(counts) + 1
    assert bool((edges.diff() > 0).all()) and edges[0] == -math.inf and edges[-1] == math.inf
    gaps = np.concatenate([r["trainer"] - r["rollout"] for r in random_responses(9, 30, seed=9)])
    above, edges = counts[len(counts) // 2 + 1 : -1], edges[len(counts) // 2 + 1 : -1].numpy()
    below = counts[1 : len(counts) // 2].flip(0)
    assert counts[len(counts) // 2] == (np.abs(gaps) < 2.0**-30).sum()
    assert above.tolist() == np.histogram(gaps, edges)[0].tolist()
    assert below.tolist() == np.histogram(-gaps, edges)[0].tolist(), "mirrored: closed towards 0"


def test_inputs_are_left_alone_and_no_graph_is_kept():
    tensors, mask = padded(random_responses(4, 9, seed=10))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    sums = MismatchSums()
    sums.update(tensors["trainer"].requires_grad_(), tensors["rollout"], mask, tensors["advantage"])
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert not sums.to_tensor().requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2)), "rollout_log_probs has shape .1, 3."),
        ((torch.zeros(1, 2).long(), torch.zeros(1, 2), torch.ones(1, 2)), "trainer_log_probs is torch.int64"),
        ((torch.zeros(1, 2), torch.zeros(1, 2), None), "response_mask is None"),
        ((torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(3)), "advantages has shape .3,."),
        ((torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), None, 0), "chunk_tokens=0"),
        ((torch.nested.nested_tensor([torch.zeros(2)]), torch.zeros(1, 2), None), "layout torch.strided"),
        ((torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), torch.zeros(1, 2), None), "nest all"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        MismatchSums().update(*arguments)
