"""Every metric equals plain float64 numpy, however the batch is laid out and cut, and whatever it holds."""

import math

import numpy as np
import plain_statistics
import pytest
import torch
from batches import KINDS, assert_close, in_pieces, jagged, measured, padded, random_responses
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.base.errors import ConfigurationError
from verl_precision.mismatch import fused
from verl_precision.mismatch.statistics import MismatchStatistics
from verl_precision.mismatch.token_sums import absolute, gap_counts, gap_edges, quantile

SEEDS = st.integers(0, 10**6)
GAPS = st.sampled_from([0.0, 1e-6, 1e-3, 0.2, 3.0, 1000.0])
NESTED = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
LEVELS = st.sampled_from([0.001, 0.01, 0.25, 0.5, 0.9, 0.999])


@pytest.fixture(scope="module", params=["kernel", "torch"], autouse=True)
def way(request):
    """Both ways to measure have to pass; these batches are too small for the kernel by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "SMALLEST_BATCH", 0 if request.param == "kernel" else math.inf)
        yield request.param


def mismatch_of(pi, mu, mask=None, *more, **options):
    mask = torch.ones_like(pi) if mask is None else mask
    found = MismatchStatistics.measure(pi, mu, mask, *more, **options).metrics()
    return {name.removeprefix("mismatch/"): value for name, value in found.items()}


def test_two_tokens_by_hand():
    """π = (1/2, 1/4), μ = (1/4, 1/2): g = ±ln 2; k3 = ((2 - ln 2 - 1) + (1/2 + ln 2 - 1)) / 2 = 1/4;
    total variation = (|2 - 1| + |1/2 - 1|) / 2 / 2 = 3/8; chi-square = (2² - 1 + (1/2)² - 1) / 2 = 9/8; the response's
    ratio is 1."""
    mu, pi = torch.tensor([[0.25, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    found = mismatch_of(pi, mu, None, torch.tensor([1.0]))
    expected = {
        "log_prob_gap_abs_mean": math.log(2), "log_prob_gap_std": math.log(2), "k3_kl": 0.25,
        "total_variation": 0.375, "chi_square": 1.125,
        "probs_diff_abs_mean": 0.25, "probs_diff_min": -0.25, "probs_diff_max": 0.25, "probs_pearson": -1,
        "sequence_ess": 1, "sequence_ratio_within_c": 1, "prob_1e-1_1/token_fraction": 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    for name in ("log_prob_gap_mean", "k1_kl", "sequence_log_ratio_mean", "log_prob_gap_mean_positive_advantage"):
        assert found[name] == pytest.approx(0, abs=1e-7), name
    assert "log_prob_gap_mean_negative_advantage" not in found
    assert "sequence_log_ratio_abs_per_1k_tokens" not in found, "one length has no slope"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(st.integers(0, 9), st.integers(0, 40), SEEDS, GAPS, st.sampled_from([1, 7, 64, 1 << 19]))
def test_equals_numpy(kind, rows, longest, seed, gap, tokens):
    responses = random_responses(rows, longest, seed, gap)
    expected = KINDS[kind][2](responses)
    for layout in (padded, jagged) if rows else (padded,):
        with in_pieces(tokens):
            assert_close(measured(responses, kind, layout).metrics(), expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), max_size=6), SEEDS, st.sampled_from([1e-3, 0.2, 1000.0]))
def test_merged_pieces_are_the_whole(kind, cuts, seed, gap):
    responses = random_responses(30, 20, seed, gap)
    edges, merged = [0, *sorted(cuts), 30], KINDS[kind][0]()
    for first, last in zip(edges, edges[1:], strict=False):
        merged = merged.merge(measured(responses[first:last], kind))
    assert_close(merged.metrics(), KINDS[kind][2](responses))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30, 5.0])
def test_masked_tokens_never_matter(junk):
    responses = random_responses(12, 30, seed=5)
    found = measured(responses, junk=junk, width=64).metrics()
    assert found == measured(responses, width=64).metrics()
    assert_close(found, measured(responses).metrics(), tolerance=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_holes_in_the_mask_and_any_floating_type(dtype):
    """Tool output between a response's turns is masked: the rest is one response."""
    (response,) = random_responses(1, 40, seed=6, shortest=40)
    for name in ("trainer", "rollout"):
        response[name] = torch.tensor(response[name]).to(dtype).double().numpy()
    keep = np.arange(40) % 3 != 0
    found = measured([response], mask=torch.tensor(keep[None]), dtype=dtype)
    assert_close(found.metrics(), plain_statistics.mismatch([{name: x[keep] for name, x in response.items()}]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e-3])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names, *_) in KINDS.items() for name in names])
def test_bad_tokens_are_counted_and_left_out(bad, kind, name):
    responses = random_responses(8, 20, seed=8, gap=0.2, shortest=3)
    responses[2][name][1] = responses[5][name][0] = bad
    found = measured(responses, kind).metrics()
    assert_close(found, KINDS[kind][2](responses))
    prefix = KINDS[kind][0].prefix
    assert found[f"{prefix}nonfinite_tokens"] == (0 if bad == 1e-3 else 2)
    assert found[f"{prefix}positive_log_probs"] == (2 if bad == 1e-3 else 0)
    assert found.get("mismatch/responses", 6) == 6, "a response with a hole has no ratio"


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (3, 5)])
def test_nothing_to_measure(shape):
    nothing = torch.zeros(shape)
    counts = {"tokens": 0, "responses": 0, "nonfinite_tokens": 0, "positive_log_probs": 0}
    assert mismatch_of(nothing, nothing, nothing, nothing) == counts
    bad = mismatch_of(torch.full(shape, math.nan), nothing)
    assert bad == {**counts, "nonfinite_tokens": math.prod(shape)}


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_ratios_stay_finite(sign):
    """A gap of 1000 in one token, 30000 in a response: the ESS is 1, the ratio itself never formed."""
    pi, mu = torch.full((2, 30), -1.0), torch.full((2, 30), -1.0)
    (mu if sign > 0 else pi)[0] = -1001.0
    found = mismatch_of(pi, mu)
    assert all(map(math.isfinite, found.values()))
    assert found["sequence_log_ratio_max"] == (30000 if sign > 0 else 0)
    assert found["sequence_ess"] == 1
    assert found["probs_diff_max" if sign > 0 else "probs_diff_min"] == pytest.approx(sign / math.e)
    assert found["k3_kl"] == pytest.approx((math.expm1(600) - 600) / 2 if sign > 0 else 999 / 2)


def test_identical_policies_and_constant_probabilities():
    mu = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    found = mismatch_of(mu, mu.clone())
    assert all(value == 0 for name, value in found.items() if "gap" in name or "kl" in name or "diff" in name)
    assert found["probs_pearson"] == pytest.approx(1)
    assert found["sequence_ess"] == 3
    assert "probs_pearson" not in mismatch_of(torch.full((2, 3), -0.3), torch.full((2, 3), -0.3))


def test_tiny_gap_keeps_its_digits(way):
    """k3 of a gap of 1e-7 is 5e-15: e^g - g - 1 would be all rounding, and so would a difference of sums."""
    mu = torch.full((1, 1000), -1.0, dtype=torch.float64)
    gap = (mu + 1e-7) - mu
    expected = pytest.approx((gap**2 / 2 + gap**3 / 6).mean().item(), rel=1e-14 if way == "kernel" else 1e-8)
    assert mismatch_of(mu + 1e-7, mu)["k3_kl"] == expected


@settings(max_examples=60)
@given(st.lists(st.floats(-5000, 5000, width=32), min_size=1, max_size=50), LEVELS)
def test_quantiles_are_within_a_sixteenth(values, q):
    gap, counts = np.array(values), gap_counts(torch.tensor(values, dtype=torch.float64))
    assert counts.sum() == len(values)
    signed = (gap, gap_edges(), counts, gap.min(), gap.max())
    for sample, edges, folded, low, high in (signed, (np.abs(gap), *absolute(counts), 0.0, np.abs(gap).max())):
        found, exact = quantile(edges, folded, q, low, high), np.quantile(sample, q, method="inverted_cdf")
        if abs(exact) < 4096:
            assert abs(found - exact) <= max(abs(exact) / 16, 2**-29)
        else:
            assert abs(found) >= 4096


def test_histogram_holds_every_token():
    responses = random_responses(9, 30, seed=9)
    edges, counts = gap_edges(), measured(responses).statistics["log_prob_gap"].counts
    assert bool((edges.diff() > 0).all()) and edges[0] == -math.inf and edges[-1] == math.inf
    gaps, middle = np.concatenate([r["trainer"] - r["rollout"] for r in responses]), len(counts) // 2
    bounded = edges[middle + 1 : -1].numpy()
    assert counts[middle] == (np.abs(gaps) < 2.0**-30).sum()
    assert counts[middle + 1 : -1].tolist() == np.histogram(gaps, bounded)[0].tolist()
    assert counts[1:middle].flip(0).tolist() == np.histogram(-gaps, bounded)[0].tolist(), "mirrored: closed towards 0"


def test_inputs_are_left_alone():
    tensors, mask = padded(random_responses(4, 9, seed=10))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    MismatchStatistics.measure(tensors["trainer"].requires_grad_(), tensors["rollout"], mask, tensors["advantage"])
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_another_threshold_is_refused():
    one, two = (MismatchStatistics.measure(*torch.full((3, 1, 1), -1.0), ratio_threshold=c) for c in (3.0, 2.0))
    with pytest.raises(ConfigurationError, match=r"\(3.0,\) and \(2.0,\) cannot be merged"):
        one.merge(two)
    with pytest.raises(ConfigurationError, match="ratio_threshold=0.5"):
        MismatchStatistics.measure(*torch.full((3, 1, 1), -1.0), ratio_threshold=0.5)


@pytest.mark.parametrize(("arguments", "message"), [
    ((torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2)), r"rollout_log_probs is torch.float32, \(1, 3\)"),
    ((torch.zeros(1, 2).long(), torch.zeros(1, 2), torch.ones(1, 2)), "trainer_log_probs is torch.int64"),
    ((torch.zeros(1, 2), torch.zeros(1, 2), None), "response_mask is None"),
    ((torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(3)), r"advantages is .*\(3,\)"),
    ((torch.nested.nested_tensor([torch.zeros(2)]), torch.zeros(1, 2), None), "nested, torch.strided"),
    ((NESTED, torch.zeros(1, 2), None), "nest all"),
    ((NESTED, torch.nested.nested_tensor([torch.zeros(3)], layout=torch.jagged), None), "same lengths"),
])  # fmt: skip
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        MismatchStatistics.measure(*arguments)
