"""avg@k, pass@k, truncation and standard errors, by hand and against NumPy; what `verl-precision evaluate` refuses."""

import json
from itertools import product

import numpy as np
import pandas as pd
import pytest
from made_up import six_characters
from rich.console import Console

from verl_precision.base.content import response_seed
from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.tools.engines.model import find_model, tokenize
from verl_precision.tools.evaluate import accuracy, session
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.jobs.settings import Evaluation


def made(dtypes=("bf16", "fp16"), contexts=(8, 20), responses=4):
    return Evaluation(model="m", data=("a.jsonl",), contexts=contexts, dtypes=dtypes, responses=responses)


def measured(evaluation, sets, drawn):
    """Responses of `drawn[dtype][problem]`, a list of (tokens, why it ended, correct); prompts have 3 tokens."""
    each = ((dtype, name, of) for dtype, problems in drawn.items() for name, of in problems.items())
    rows = [(dtype, name, at, *one) for dtype, name, of in each for at, one in enumerate(of)]
    records = pd.DataFrame(rows, columns=["dtype", "problem", "response", "tokens", "finish_reason", "correct"])
    prompts = dict.fromkeys(records["problem"], (1, 2, 3))
    return accuracy.responses(evaluation, sets, prompts, records.sample(frac=1, random_state=0))


def same(*correct):
    """Responses of two tokens with the same verdict in both contexts."""
    return [(2, "stop", [each, each]) for each in correct]


def test_what_a_shorter_context_cuts_is_counted_there_alone():
    """With prompts of 3 tokens a context of 8 leaves 5: of 17, 5, 6 and 17 tokens it cuts three; 20 cuts one."""
    late = [False, True]
    drawn = [(17, "length", late), (5, "stop", [True, True]), (6, "stop", late), (17, "stop", late)]
    found = accuracy.accuracies(measured(made(("fp16",)), {"set": ["a"]}, {"fp16": {"a": drawn}}))
    assert found[["truncated", "average", "mean_tokens"]].values.tolist() == [[0.75, 0.25, 5], [0.25, 1.0, 45 / 4]]
    assert found["standard_error"].isna().all(), "one problem says nothing of others"


def test_against_numpy_on_random_verdicts():
    generator = np.random.default_rng(0)
    verdicts = {dtype: generator.random((40, 8)) < generator.random((40, 1)) for dtype in ("bf16", "fp16", "fp32")}
    names = [str(number) for number in range(40)]
    drawn = {dtype: {name: same(*map(bool, rows[int(name)])) for name in names} for dtype, rows in verdicts.items()}
    found = measured(made(tuple(drawn), responses=8), {"all": names, "first": names[:7]}, drawn)
    results = accuracy.accuracies(found)
    assert [*results[accuracy.PLACE].itertuples(index=False)] == [*product((8, 20), ("all", "first"), drawn)]
    for _, each in results.iterrows():
        rows = verdicts[each["dtype"]][: each["problems"]]
        assert each["average"] == pytest.approx(rows.mean()) and each["pass"] == rows.any(axis=1).mean()
        assert each["standard_error"] == pytest.approx(np.sqrt(np.cov(rows.mean(axis=1)) / len(rows)))
    changes = accuracy.differences(found)
    pairs = [*changes[[*accuracy.PLACE, "reference"]].itertuples(index=False)]
    expected = [("fp16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16")]
    assert sorted(pairs) == sorted((*at, *pair) for *at, pair in product((8, 20), ("all", "first"), expected))
    for _, each in changes.iterrows():
        count = 40 if each["data"] == "all" else 7
        change = (verdicts[each["dtype"]][:count] - 1.0 * verdicts[each["reference"]][:count]).mean(axis=1)
        assert each["average"] == pytest.approx(change.mean())
        assert each["standard_error"] == pytest.approx(np.sqrt(np.cov(change) / count))


def test_the_standard_error_is_the_spread_of_repeated_evaluations():
    """2,000 sets of 30 problems, each with its own difficulty and 4 responses: avg@4 spreads by its standard error."""
    generator = np.random.default_rng(1)
    right = generator.random((2000, 30, 4)) < generator.beta(0.5, 0.5, (2000, 30, 1))
    rows = [(number, str(name), bool(one)) for (number, name, _), one in np.ndenumerate(right)]
    drawn = pd.DataFrame(rows, columns=["data", "problem", "correct"])
    found = accuracy.accuracies(drawn.assign(context=8, dtype="fp16", truncated=False, tokens=1))
    assert found["standard_error"].mean() == pytest.approx(found["average"].std(), rel=0.05)
    as_if_independent = np.sqrt(right.mean() * (1 - right.mean()) / 120)
    assert found["standard_error"].mean() > 1.4 * as_if_independent


def test_tables_and_json():
    """By hand: shares 1, 1/2 in BF16 have mean 3/4, deviations ±1/4, error √(1/8 / 2). Differences 0, -1/4."""
    bf16 = {"a": same(True, True, True, True), "b": same(True, True, False, False)}
    fp16 = {"a": same(True, True, True, True), "b": same(True, False, False, False)}
    evaluation, sets = made(), {"set": ["a", "b"], "one": ["a"]}
    found = measured(evaluation, sets, {"bf16": bf16, "fp16": fp16})
    text = accuracy.markdown(evaluation, found, {"set": 0, "one": 3}, {"verl": "1"})
    assert "| set | 8 | bf16 | 75.00 ± 25.00 | 100.00 | 0.00 | 2 | 2 |" in text
    assert "| set | 8 | fp16 | 62.50 ± 37.50 | 100.00 | 0.00 | 2 | 2 |" in text
    assert "| set | 8 | fp16 - bf16 | -12.50 ± 12.50 |" in text and "| one | 8 | fp16 - bf16 | +0.00 |" in text
    assert "Left out of one" in text and "Left out of set" not in text and "verl 1." in text
    content = accuracy.summary(found, {"set": 0})
    assert content["results"][1]["problems"] == {"a": 1.0, "b": 0.25}
    assert json.dumps(content, allow_nan=False), "no NaN, which JSON has not"
    assert content["results"][2]["standard_error"] is None and content["results"][2]["data"] == "one"
    assert content["differences"][0]["standard_error"] == pytest.approx(0.125)
    alone = measured(made(("fp16",)), sets, {"fp16": fp16})
    assert "two dtypes" not in accuracy.markdown(made(("fp16",)), alone, {}, {})


@pytest.fixture
def evaluate(tmp_path, made_up, reward_name, row, write_rows):
    """Evaluate three problems with an engine that is made up: the seed chooses the answer."""
    made_up.answer = six_characters
    for name, numbers in (("sums", (0, 1, 2)), ("two", (1, 2))):
        rows = [row(number, reward_model={"style": "rule", "ground_truth": str(number)}) for number in numbers]
        write_rows(tmp_path / f"{name}.jsonl", rows)

    def run(**changes):
        values = {"model": "tiny:qwen3", "data": (tmp_path / "sums.jsonl", tmp_path / "two.jsonl"), "responses": 5}
        values |= {"dtypes": ("bf16", "fp16"), "contexts": (100, 200), "reward": reward_name}
        return session.evaluate(Evaluation(output=tmp_path / "job", **{**values, **changes}), Console(quiet=True))

    return run


def test_accuracies_are_those_of_the_texts(evaluate, made_up, tmp_path):
    """The seed decides: in the long context the last character is seed % 2, in the short one, which cuts, seed % 3."""
    data = read_data_set(tmp_path / "sums.jsonl").problems
    (length,) = {len(chat) for chat in tokenize([each.prompt for each in data], find_model("tiny:qwen3"))}
    short = length + 2
    found = evaluate(contexts=(short, length + 6), keep_text=True)
    assert {request.max_tokens for _, request in made_up.requests} == {6}
    assert len(made_up.seen) == 2 * 3 * 5, "a problem that is in both data sets is drawn once"
    shares = accuracy.shares(found)
    for _, each in accuracy.accuracies(found).iterrows():
        modulus, truncated, tokens = (3, 1.0, 2) if each["context"] == short else (2, 0.0, 6)
        assert (each["truncated"], each["mean_tokens"]) == (truncated, tokens)
        drawn = [problem for problem in data if each["data"] == "sums" or problem.ground_truth != "0"]
        said = [[str(response_seed(0, one.identifier, index) % modulus) for index in range(5)] for one in drawn]
        right = [answers.count(one.ground_truth) for answers, one in zip(said, drawn, strict=True)]
        assert shares[tuple(each[accuracy.PLACE])].tolist() == [count / 5 for count in right]
    lines = [json.loads(line) for line in (tmp_path / "job" / "journal.jsonl").read_text().splitlines()[1:]]
    assert all(line["text"].count("=") == 4 for line in lines)
    assert "| sums | " in (tmp_path / "job" / "table.md").read_text()
    assert len(json.loads((tmp_path / "job" / "summary.json").read_text())["differences"]) == 4


def test_other_data_and_damaged_journals_are_refused(evaluate, tmp_path):
    evaluate()
    journal = tmp_path / "job" / "journal.jsonl"
    before = journal.read_bytes()
    with pytest.raises(ConfigurationError, match="reward: 'reward.py:compute_score@.*' there, 'verl' now; data: "):
        evaluate(data=(tmp_path / "sums.jsonl",), reward="verl")
    assert journal.read_bytes() == before
    for damage in ({}, {"dtype": "fp32"}, {"problem": "x"}, {"response": 5}, {"correct": [True]}, {"correct": [1, 0]}):
        record = {**json.loads(before.splitlines()[1]), **damage}  # without damage it is there twice
        journal.write_bytes(before + json.dumps(record).encode() + b"\n")
        with pytest.raises(CheckpointStateError, match="is none of this job's"):
            evaluate()
