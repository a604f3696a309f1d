"""avg@k, pass@k, truncation and standard errors, by hand and against NumPy; tables and JSON of them."""

import json
import math

import numpy as np
import pytest

from verl_precision.tools.evaluate.accuracy import (
    Drawn,
    Task,
    accuracies,
    differences,
    markdown,
    standard_error,
    summary,
)
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.problems import Problem


def made(dtypes=("bf16", "fp16"), contexts=(8, 20), responses=4):
    return Evaluation(model="m", data=("a.jsonl",), contexts=contexts, dtypes=dtypes, responses=responses)


def measured(evaluation, sets, drawn):
    """Statistics of `drawn[dtype][problem]`, a list of (tokens, cut, correct); prompts have 3 tokens."""
    names = {name for each in sets.values() for name in each}
    tasks = {name: Task(Problem(name, 0, [], "", "", {}), (1, 2, 3)) for name in names}
    outcomes = {
        dtype: {(name, index): Drawn(*one) for name, each in problems.items() for index, one in enumerate(each)}
        for dtype, problems in drawn.items()
    }
    return accuracies(evaluation, sets, tasks, outcomes)


def same(*correct):
    """Responses of two tokens with the same verdict in both contexts."""
    return [(2, False, (each, each)) for each in correct]


def test_by_hand():
    """Shares 1, 1/2, 0 in BF16: mean 1/2, deviations 1/2, 0, -1/2, error √(1/2 / (3·2)). Differences 0, 1/4, 0."""
    bf16 = {"a": same(True, True, True, True), "b": same(True, True, False, False), "c": same(*[False] * 4)}
    fp16 = {**bf16, "b": same(True, True, True, False)}
    found = measured(made(), {"set": ["a", "b", "c"]}, {"bf16": bf16, "fp16": fp16})
    assert [(each.context, each.dtype) for each in found] == [(8, "bf16"), (8, "fp16"), (20, "bf16"), (20, "fp16")]
    first = found[0]
    assert first.average == 0.5 and first.error == pytest.approx(math.sqrt(0.5 / 6)) and first.passed == 2 / 3
    assert first.truncated == 0 and first.mean_tokens == 2
    change = differences(found)
    assert [(each.context, each.dtype, each.reference) for each in change] == [
        (8, "fp16", "bf16"),
        (20, "fp16", "bf16"),
    ]
    assert change[0].average == pytest.approx(1 / 12)
    assert change[0].error == pytest.approx(math.sqrt(((1 / 6) ** 2 + 2 * (1 / 12) ** 2) / 6))


def test_what_a_shorter_context_cuts_is_counted_there_alone():
    """With prompts of 3 tokens a context of 8 leaves 5: of 17, 5, 6 and 17 tokens it cuts three; 20 cuts one."""
    drawn = [(17, True, (False, True)), (5, False, (True, True)), (6, False, (False, True)), (17, False, (False, True))]
    short, long = measured(made(("fp16",)), {"set": ["a"]}, {"fp16": {"a": drawn}})
    assert (short.truncated, short.average, short.mean_tokens) == (0.75, 0.25, 5)
    assert (long.truncated, long.average, long.mean_tokens) == (0.25, 1.0, 45 / 4)
    assert math.isnan(short.error), "one problem says nothing of others"


def test_against_numpy_on_random_verdicts():
    generator = np.random.default_rng(0)
    verdicts = {dtype: generator.random((40, 8)) < generator.random((40, 1)) for dtype in ("bf16", "fp16", "fp32")}
    names = [str(number) for number in range(40)]
    drawn = {
        dtype: {name: same(*map(bool, each)) for name, each in zip(names, rows, strict=True)}
        for dtype, rows in verdicts.items()
    }
    found = measured(made(tuple(drawn), (20,), 8), {"all": names, "first": names[:7]}, drawn)
    assert [(each.data, each.dtype) for each in found][2:4] == [("all", "fp32"), ("first", "bf16")]
    for each in found:
        rows = verdicts[each.dtype][: len(each.shares_P)]
        assert each.average == pytest.approx(rows.mean()) and each.passed == rows.any(axis=1).mean()
        shares = rows.mean(axis=1)
        assert each.error == pytest.approx(np.sqrt(np.cov(shares) / len(shares)))
    pairs = [(each.data, each.dtype, each.reference) for each in differences(found)]
    expected = [("fp16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16")]
    assert sorted(pairs) == sorted((data, *pair) for data in ("all", "first") for pair in expected)
    for each in differences(found):
        rows = [
            verdicts[dtype][: 40 if each.data == "all" else 7].mean(axis=1) for dtype in (each.dtype, each.reference)
        ]
        assert each.average == pytest.approx((rows[0] - rows[1]).mean())
        assert each.error == pytest.approx(np.sqrt(np.cov(rows[0] - rows[1]) / len(rows[0])))


def test_the_standard_error_is_the_spread_of_repeated_evaluations():
    """2,000 sets of 30 problems, each with its own difficulty and 4 responses: avg@4 spreads by its standard error."""
    generator = np.random.default_rng(1)
    shares = generator.binomial(4, generator.beta(0.5, 0.5, (2000, 30))) / 4
    errors = [standard_error(each) for each in shares]
    assert np.mean(errors) == pytest.approx(shares.mean(axis=1).std(), rel=0.05)
    as_if_independent = np.sqrt(shares.mean() * (1 - shares.mean()) / 120)
    assert np.mean(errors) > 1.4 * as_if_independent


def test_tables_and_json():
    bf16 = {"a": same(True, True, True, True), "b": same(True, True, False, False)}
    fp16 = {"a": same(True, True, True, True), "b": same(True, False, False, False)}
    evaluation, sets = made(), {"set": ["a", "b"], "one": ["a"]}
    found = measured(evaluation, sets, {"bf16": bf16, "fp16": fp16})
    text = markdown(evaluation, found, differences(found), {"set": 0, "one": 3}, {"verl": "1"})
    assert "| dtype | set (8) | one (8) | set (20) | one (20) |" in text
    assert "| bf16 | 75.00 ± 25.00 | 100.00 | 75.00 ± 25.00 | 100.00 |" in text
    assert "| set | 8 | fp16 | 62.50 ± 37.50 | 100.00 | 0.00 | 2 | 2 |" in text
    assert "| set | 8 | fp16 - bf16 | -12.50 ± 12.50 |" in text and "| one | 8 | fp16 - bf16 | +0.00 |" in text
    assert "Left out of one" in text and "Left out of set" not in text and "verl 1." in text
    content = summary(found, differences(found), sets, {"set": 0})
    assert content["results"][1]["problems"] == {"a": 1.0, "b": 0.25}
    assert json.dumps(content, allow_nan=False), "no NaN, which JSON has not"
    assert content["results"][2]["standard_error"] is None and content["results"][2]["data"] == "one"
    assert content["differences"][0]["standard_error"] == pytest.approx(0.125)
    one_dtype = made(("fp16",))
    alone = measured(one_dtype, sets, {"fp16": fp16})
    assert "two dtypes" not in markdown(one_dtype, alone, differences(alone), {}, {})
