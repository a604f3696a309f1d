"""Verdicts against every end; early stopping changes nothing but the work; from verdicts to files."""

import json
import random
import re
from fractions import Fraction
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.evaluate import session
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.jobs.settings import SanitySet

N = 40
EASY, HARD, FLIP = [True] * N, [False] * N, [index % 2 == 0 for index in range(N)]


def job(**changes):
    return SanitySet(**{"data": "d.jsonl", "model": "m", **changes})


@given(st.integers(1, 12), st.tuples(st.fractions(0, 1), st.fractions(0, 1)), st.data())
def test_decided_exactly_when_every_end_agrees(responses, ends, data):
    low, high = sorted(ends)
    try:
        window = job(responses=responses, low=low, high=high)
    except ConfigurationError:
        window = job(responses=responses, low=Fraction(0), high=high)
    drawn = data.draw(st.integers(0, responses))
    correct = data.draw(st.integers(0, drawn))
    left = range(responses - drawn + 1)
    kept = {window.low <= Fraction(correct + more, responses) <= window.high for more in left}
    assert window.verdict(correct, drawn) == ("open" if len(kept) == 2 else "kept" if kept == {True} else "dropped")


@st.composite
def tables(draw):
    """Problems of all difficulties: independent coins with an accuracy of their own."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    accuracies = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.75, 0.8, 0.9, 1.0])
    drawn = draw(st.lists(accuracies, min_size=1, max_size=6))
    return [[generator.random() < accuracy for _ in range(N)] for accuracy in drawn]


def begin(table, before=()):
    """Return the responses to problems with these verdicts, of which a journal has some."""
    records = [{"problem": name, "response": at, "correct": table[int(name)][at], "tokens": 1} for name, at in before]
    journal = Mock(**{"records.return_value": records})
    judging = Mock(request=lambda name, at, most: (name, at), is_correct=lambda name, text: text)
    return session._UntilDecided(job(), journal, judging, [str(number) for number in range(len(table))])


def play(table, in_flight, order, before=()):
    """Draw until all is decided, responses coming back in any order; return what counts them, and what was drawn."""
    responses, out, drawn = begin(table, before), [], []
    while responses.done < responses.total:
        new = responses.next_requests(in_flight - len(out))
        out += new
        drawn += new
        assert 0 < len(out) <= in_flight, "open problems, and nothing in flight, or too much"
        for _ in range(order.randint(1, len(out))):
            name, at = out.pop(order.randrange(len(out)))
            responses.record(Response(name, at, 1, table[int(name)][at]))
    return responses, drawn


@settings(max_examples=60)
@given(tables(), st.integers(1, 300), st.randoms(use_true_random=False), st.data())
def test_kept_set_is_that_of_all_responses(table, in_flight, order, data):
    """Whatever is known already, in part or in full, is not drawn again."""
    keys = [(str(problem), response) for problem in range(len(table)) for response in range(N)]
    before = data.draw(st.lists(st.sampled_from(keys), unique=True))
    responses, drawn = play(table, in_flight, order, before)
    by_definition = [str(number) for number, row in enumerate(table) if 8 <= sum(row) <= 32]
    assert [name for name, tally in responses.tallies.items() if tally.verdict == "kept"] == by_definition
    assert len({*drawn, *before}) == len(drawn) + len(before)


@pytest.mark.parametrize(("problem", "response"), [("1", 0), ("0", N), ("0", -1), ("0", 3)])
def test_what_cannot_be_counted_is_refused(problem, response):
    responses = begin([EASY], [("0", 3)])
    with pytest.raises(CheckpointStateError, match=f"response {response} to problem {problem}"):
        responses.record(Response(problem, response, 1, True))


@pytest.fixture
def drawn(tmp_path, row, write_rows, made_up, write_reward):
    """Write a data set whose responses have these verdicts and ten tokens each; return the options of a job on it."""

    def of(verdicts):
        data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(len(verdicts))])
        names = [problem.identifier for problem in read_data_set(data).problems]
        texts = {(name, n): str(one) for name, each in zip(names, verdicts, strict=True) for n, one in enumerate(each)}
        made_up.answer = lambda name, request: Response(*request.key, 10, texts[request.key])
        right = write_reward("return solution_str == 'True'")
        return {"data": data, "model": "tiny:qwen3", "output": tmp_path / "out", "reward": right}

    return of


@pytest.fixture
def build(drawn, tmp_path):
    """Build a sanity set from verdicts; returns the summary and the folder."""

    def run(verdicts, **options):
        given = {**drawn(verdicts), "responses": len(verdicts[0]), **options}
        return session.build_sanity_set(SanitySet(**given), Console(quiet=True)), tmp_path / "out"

    return run


def kept_rows(folder):
    return [row["extra_info"]["index"] for row in parquet.read_table(folder / "kept.parquet").to_pylist()]


def test_summary_by_hand(build):
    """In flight 1: 33 + 33 + 16 responses of 120; 10 tokens each."""
    summary, folder = build([EASY, HARD, FLIP], in_flight=1)
    assert kept_rows(folder) == [2]
    assert (summary["kept"], summary["too_easy"], summary["too_hard"]) == (1, 1, 1)
    assert (summary["responses_drawn"], summary["responses_saved"]) == (82, 38)
    assert summary["tokens_drawn"] == 820
    assert summary["histogram"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    content = json.loads((folder / "summary.json").read_text())
    assert content["summary"]["kept"] == 1
    assert [p["verdict"] for p in content["problems"].values()] == ["dropped", "dropped", "kept"]


def test_the_command_says_what_it_saved_and_resumes_with_shares_written_otherwise(drawn, typed):
    given = drawn([FLIP] * 3)
    words = ["sanity-set", given.pop("data"), *(word for name in given for word in (f"--{name}", given[name]))]
    first, again = ("--low", "1/5", "--high", "4/5"), ("--low", "0.2", "--high", "0.8")
    code, shown = typed(*words, *first, "--in-flight", "1")
    assert code == 0 and re.search("3/3 problems decided, 48 responses.*responses saved *72", shown), shown
    code, shown = typed(*words, *again)
    assert code == 0 and "resuming: 48 responses are in the journal" in shown


def test_a_window_that_keeps_everything_draws_nothing(build):
    summary, folder = build([EASY, HARD], low=0, high=1)
    assert (summary["kept"], summary["responses_drawn"], summary["responses_saved"]) == (2, 0, 80)
    assert kept_rows(folder) == [0, 1] and sum(summary["histogram"]) == 0


def test_a_window_that_keeps_nothing_shows_the_histogram(build, tmp_path):
    with pytest.raises(ConfigurationError, match=r"keeps none of 3 problems.*: 1, 0, 0, 0, 0, 0, 0, 0, 0, 2\. Choose"):
        build([EASY, EASY, HARD])
    assert (tmp_path / "out" / "summary.json").is_file()
    assert not (tmp_path / "out" / "kept.parquet").exists()
