"""Statistics, table and figures of known gaps; files and refusals of `mismatch`, with jobs/test_contract.py."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.gap import pairs as mismatch_job
from verl_precision.tools.gap.pairs import cells, growth_cells, markdown, measure, ranked, summary, write_figures
from verl_precision.tools.jobs import job
from verl_precision.tools.jobs.job import Series
from verl_precision.tools.jobs.settings import MismatchJob

FIGURES = ["tokens.png", "token_gaps.png", "sequences.png"]
# Standard deviation of a token's gap: the ranking that the figures and the table must show.
GAPS = {("fp16", "fp16"): 1e-4, ("bf16", "fp16"): 1e-3, ("fp16", "bf16"): 2e-3, ("bf16", "bf16"): 4e-3}


def write_pair(store, rollout, train, log_probs):
    """Write sample and score of responses, by their place in the store; the others are empty."""
    for place, (problem, response) in enumerate(store.keys):
        for series, values in zip((None, train), log_probs.get(place, ([], [])), strict=True):
            answer = Response(problem, response, len(values), token_ids=(9,) * len(values), log_probs=tuple(values))
            Series(store, rollout, series).record(answer)


def test_by_hand(store):
    write_pair(store, "fp16", "fp16", {0: ([-1.0, -2.0], [-1.5, -2.0]), 5: ([-1.0], [-0.5])})
    pair = measure(store, "fp16", "fp16")
    assert pair.empty_responses == 4
    assert pair.lengths.tolist() == [2, 1]
    assert pair.sequence_log_ratios.tolist() == [-0.5, 0.5]
    assert pair.metrics["mismatch/log_prob_gap_abs_mean"] == pytest.approx(1 / 3)
    header, (row,) = cells([pair])
    assert row[header.index("equal tokens")] == "1 of 3"
    # k3 of gaps -0.5, 0, 0.5 is (2 cosh 0.5 - 2)/3
    assert pair.k3 == pytest.approx((2 * math.cosh(0.5) - 2) / 3, rel=1e-12)
    # k3 of the two responses: a = e^-0.5 - 0.5 on two tokens, b = e^0.5 - 1.5 on one; residuals of the ratio (a + b)/3
    a, b = math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5
    residual = a - (a + b) / 3 * 2
    assert pair.k3_error == pytest.approx(math.sqrt(2 * 2 * residual**2) / 3)
    assert sorted(pair.gaps.tolist()) == [-0.5, 0.0, 0.5]
    assert np.log(pair.probs[0]) - np.log(pair.probs[1]) == pytest.approx(pair.gaps)


def test_growth_by_hand(store):
    gaps = [0.5, -0.5, 0.25]  # of every token of a response: Σ of the first 64 is 64 gap, of the first 128 128 gap
    lengths = [64, 130, 128]
    drawn = {at: (np.full(n, gap - 1), np.full(n, -1.0)) for at, (gap, n) in enumerate(zip(gaps, lengths, strict=True))}
    write_pair(store, "fp16", "fp16", {at: (mu, pi) for at, (pi, mu) in drawn.items()})
    pair = measure(store, "fp16", "fp16")
    assert pair.growth[64] == (3, pytest.approx(64 * np.std(gaps, ddof=1)))
    assert pair.growth[128] == (2, pytest.approx(128 * 0.75 / math.sqrt(2))) and len(pair.growth) == 2
    header, rows = growth_cells([pair])
    assert header == ["tokens", "fp16, fp16"] and rows[1] == ["128", "6.79e+01 of 2"]
    assert summary([pair], 2)["pairs"][0]["growth"][128]["responses"] == 2
    write_pair(store, "fp16", "fp16", {0: ([-1.0], [-1.5])})
    assert growth_cells([measure(store, "fp16", "fp16")])[1] == []


def test_all_responses_empty(store):
    write_pair(store, "fp16", "fp16", {})
    with pytest.raises(ConfigurationError, match="all 6 responses sampled in fp16 are empty"):
        measure(store, "fp16", "fp16")


def test_log_probs_that_are_not_finite_show(store, tmp_path):
    write_pair(store, "fp16", "fp16", {0: ([-1.0, -2.0], [math.nan, -2.5]), 1: ([-1.0], [math.nan])})
    pair = measure(store, "fp16", "fp16")
    assert pair.metrics["mismatch/nonfinite_tokens"] == 2 and pair.k3 == pytest.approx(math.exp(-0.5) - 0.5)
    header, rows = cells([pair])
    assert rows[0][header.index("non-finite")] == "2"

    write_pair(store, "fp16", "fp16", {0: ([-1.0], [math.nan])})
    nothing = measure(store, "fp16", "fp16")
    header, rows = cells([nothing])
    assert rows[0][header.index("k3 KL")] == "undefined"
    assert ranked([nothing, pair]) == [pair, nothing]
    assert write_figures(tmp_path, [nothing], "made") == FIGURES


def test_table_and_figures_of_a_grid(store, tmp_path):
    drawing, pairs = np.random.default_rng(1), []
    for rollout, train in store.job.pairs:
        drawn = [drawing.uniform(-6, -0.01, length) for length in (3, 40, 7, 0, 12, 25)]
        scored = [np.minimum(mu + drawing.normal(0, GAPS[rollout, train], len(mu)), 0) for mu in drawn]
        write_pair(store, rollout, train, dict(enumerate(zip(drawn, scored, strict=True))))
        pairs.append(measure(store, rollout, train))
    assert all(pair.probs.shape == (2, 87) for pair in pairs), "all 87 tokens, far below the bound"
    ranking = sorted(GAPS, key=GAPS.__getitem__)
    assert [(pair.rollout, pair.train) for pair in ranked(pairs)] == ranking
    header, rows = cells(pairs)
    assert [tuple(row[:3]) for row in rows] == [(str(rank), *pair) for rank, pair in enumerate(ranking, 1)]
    assert "non-finite" not in header and "positive" not in header
    text = markdown(pairs, store.job, {"verl": "1"}, 2)
    assert "| 1 | fp16 | fp16 |" in text and "verl 1." in text and "tiny:qwen3" in text
    assert "| bf16, bf16 | 32,768 | " in text.partition("Predicted from k3")[2]
    content = summary(pairs, 2)
    assert content["pairs"][3]["predicted_spread"][512] == pytest.approx(math.sqrt(1024 * ranked(pairs)[3].k3))
    assert [(pair["rollout"], pair["train"]) for pair in content["pairs"]] == ranking
    assert content["pairs"][0]["mismatch/k3_kl"] == ranked(pairs)[0].k3
    assert json.dumps(content, allow_nan=False), "no NaN, which JSON has not"
    assert write_figures(tmp_path, pairs, "made") == FIGURES
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)


def test_the_trainers_attention_is_the_one_that_is_asked_for(made_up, monkeypatch, tmp_path):
    """vLLM chooses its own."""
    built, shown = {}, io.StringIO()

    def start(build, name, *place):
        built[name] = build
        return made_up.start(build, name, *place)

    def measured(**changes):
        asked = MismatchJob(output=tmp_path / "job", max_prompts=2, responses=3, **changes)
        return mismatch_job.measure_mismatch(asked, Console(file=shown, width=120))

    monkeypatch.setattr(mismatch_job, "write_figures", lambda folder, pairs, title: FIGURES)  # drawing takes seconds
    monkeypatch.setattr(job, "EngineProcess", start)
    pairs, said = measured(attention="eager"), shown.getvalue()
    assert len(made_up.seen) == 12 + 24 and len(pairs) == 4, "every pair on the same responses"
    assert "6/6 responses sampled in fp16, scored in fp16" in said and "wrote table.md, summary.json, tokens" in said
    attention = {name: getattr(one.args[0], "attention", None) for name, one in built.items()}
    assert attention == {"sample-fp16": None, "sample-bf16": None, "score-fp16": "eager", "score-bf16": "eager"}
    assert "attention of the trainer: eager" in (tmp_path / "job" / "table.md").read_text()
    with pytest.raises(ConfigurationError, match="attention: 'eager' there, 'sdpa' now"):
        measured()
