"""Statistics, table and figures of made-up log-probs with known gaps."""

import json
import math

import numpy as np
import pytest
from made import GAPS, VERSIONS, fill

from verl_precision.errors import ConfigurationError
from verl_precision.offline_mismatch.figures import write_figures
from verl_precision.offline_mismatch.measure import TOKENS_SHOWN, measure
from verl_precision.offline_mismatch.table import cells, markdown, ranked, summary
from verl_precision.sampling.engine import Response

RANKING = sorted(GAPS, key=GAPS.__getitem__)


def by_hand(store, log_probs):
    """Log-probs of some responses, by their place in the store; the others are empty."""
    for place, (problem, response) in enumerate(store.keys):
        mu, pi = log_probs.get(place, ([], []))
        store.add("fp16", None, Response(problem, response, len(mu), token_ids=(9,) * len(mu), log_probs=tuple(mu)))
        store.add("fp16", "fp16", Response(problem, response, len(pi), log_probs=tuple(pi)))


def test_by_hand(store):
    by_hand(store, {0: ([-1.0, -2.0], [-1.5, -2.0]), 5: ([-1.0], [-0.5])})
    pair = measure(store, "fp16", "fp16")
    assert pair.empty_responses == 4
    assert pair.lengths.tolist() == [2, 1]
    assert pair.sequence_log_ratios.tolist() == [-0.5, 0.5]
    assert pair.metrics["mismatch/log_prob_gap_abs_mean"] == pytest.approx(1 / 3)
    # k3 of gaps -0.5, 0, 0.5 is (2 cosh 0.5 - 2)/3
    assert pair.k3 == pytest.approx((2 * math.cosh(0.5) - 2) / 3, rel=1e-12)
    # k3 of the two responses: a = e^-0.5 - 0.5 on two tokens, b = e^0.5 - 1.5 on one; residuals of the ratio (a + b)/3
    a, b = math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5
    residual = a - (a + b) / 3 * 2
    assert pair.k3_error == pytest.approx(math.sqrt(2 * 2 * residual**2) / 3)
    assert sorted(pair.gaps.tolist()) == [-0.5, 0.0, 0.5]
    assert np.log(pair.probs[0]) - np.log(pair.probs[1]) == pytest.approx(pair.gaps)


def test_all_responses_empty(store):
    by_hand(store, {})
    with pytest.raises(ConfigurationError, match="all 6 responses sampled in fp16 are empty"):
        measure(store, "fp16", "fp16")


def test_log_probs_that_are_not_finite_show(store, tmp_path):
    by_hand(store, {0: ([-1.0, -2.0], [math.nan, -2.5]), 1: ([-1.0], [math.nan])})
    pair = measure(store, "fp16", "fp16")
    assert pair.metrics["mismatch/nonfinite_tokens"] == 2 and pair.k3 == pytest.approx(math.exp(-0.5) - 0.5)
    header, rows = cells([pair])
    assert rows[0][header.index("non-finite")] == "2"
    assert len(write_figures(tmp_path, [pair], "made")) == 4

    by_hand(store, {0: ([-1.0], [math.nan])})
    nothing = measure(store, "fp16", "fp16")
    header, rows = cells([nothing])
    assert rows[0][header.index("k3 KL")] == "undefined"
    assert ranked([nothing, pair]) == [pair, nothing]
    assert len(write_figures(tmp_path, [nothing], "made")) == 4


def test_table_ranks_and_carries_what_is_needed_to_repeat_it(store):
    fill(store)
    pairs = [measure(store, *pair) for pair in store.job.pairs]
    assert [(pair.rollout, pair.train) for pair in ranked(pairs)] == RANKING
    header, rows = cells(pairs)
    assert [tuple(row[1:3]) for row in rows] == RANKING and [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert "non-finite" not in header and "positive" not in header
    text = markdown(pairs, store.job, VERSIONS, 2)
    assert "| 1 | fp16 | fp16 |" in text and "verl 1." in text and "tiny:qwen3" in text
    content = json.loads(summary(pairs, store.job, VERSIONS, 2, ["verl-precision"]))
    assert [(pair["rollout"], pair["train"]) for pair in content["pairs"]] == RANKING
    assert content["pairs"][0]["mismatch/k3_kl"] == ranked(pairs)[0].k3
    assert content["settings"]["responses"] == 3 and content["versions"] == VERSIONS


def test_figures_of_a_grid(store, tmp_path):
    fill(store)
    pairs = [measure(store, *pair) for pair in store.job.pairs]
    assert all(pair.probs.shape == (2, 87) for pair in pairs), "all 87 tokens, far below the bound"
    assert pairs[0].probs.shape[1] <= TOKENS_SHOWN
    files = write_figures(tmp_path, pairs, "made")
    assert [file.name for file in files] == ["tokens.png", "token_gaps.png", "sequences.png", "grid.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
