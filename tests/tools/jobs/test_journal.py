"""What is on disk after a kill, and what is refused; what is there comes back as it was, and is not done again."""

import os
from contextlib import closing

import numpy as np
import pytest

from verl_precision.base.content import response_seed
from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.jobs.job import Series, Store
from verl_precision.tools.jobs.journal import JOURNAL, Journal

SETTINGS = {"model": "m", "seed": 0, "low": "1/5"}
FIRST, SECOND, THIRD = {"problem": "a", "value": 0.1}, {"problem": "a", "text": "text\nü"}, {"problem": "b"}


@pytest.fixture
def written(tmp_path):
    """A journal with three records."""
    with closing(Journal(tmp_path / "job", SETTINGS)) as journal:
        for record in ({**FIRST, "text": None}, SECOND, THIRD):
            journal.append(record)
        assert journal.path.read_bytes().count(b"\n") == 4, "on disk at once, so that kill -9 does not lose it"
    return tmp_path / "job" / JOURNAL


def records(folder):
    """Return the records of a journal that is opened again, and whether its last line was torn."""
    with closing(Journal(folder, SETTINGS)) as journal:
        return list(journal.records({"problem": str})), journal.torn


def test_torn_anywhere_in_the_last_line_loses_only_that_line(written):
    """Cut at every byte: complete lines stay, and what is appended next starts a line of its own."""
    folder, whole = written.parent, written.read_bytes()
    os.utime(written, (0, 0))
    assert records(folder) == ([FIRST, SECOND, THIRD], False)
    assert written.stat().st_mtime == 0, "a whole file is not touched"
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        written.write_bytes(whole[:cut])
        found, torn = records(folder)
        assert found == [FIRST, SECOND, THIRD][: max(sum(end <= cut for end in ends) - 1, 0)], cut
        assert torn == (cut not in (0, *ends))
        with closing(Journal(folder, SETTINGS)) as again:
            again.append({"problem": "c"})
        assert records(folder)[0] == [*found, {"problem": "c"}]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"model": "other" * 100}, {"new": 1}])
def test_other_settings_are_refused_by_name(written, changed):
    before = written.read_bytes()
    (name,) = changed
    with pytest.raises(ConfigurationError, match=f"begun with other settings .{name}: .* there, .* now") as caught:
        Journal(written.parent, {**SETTINGS, **changed})
    assert written.read_bytes() == before
    assert len(str(caught.value)) < 600


def test_two_processes_cannot_write_one_journal(tmp_path):
    with closing(Journal(tmp_path, SETTINGS)), pytest.raises(ConfigurationError, match="another process is writing it"):
        Journal(tmp_path, SETTINGS)
    Journal(tmp_path, SETTINGS).close()


@pytest.mark.parametrize("line", ["garbage", "[]", '{"value": 1}', '{"problem": 1}'])
@pytest.mark.parametrize("number", [1, 2])
def test_damage_before_the_last_line_is_refused(written, line, number):
    lines = written.read_text().splitlines()
    written.write_text(damaged := "\n".join([*lines[: number - 1], line, *lines[number - 1 :]]) + "\n")
    with pytest.raises(CheckpointStateError, match=f"line {number}"):
        records(written.parent)
    assert written.read_text() == damaged


def test_what_somebody_else_made_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigurationError, match="it has thesis.tex and no journal.jsonl"):
        Journal(tmp_path, SETTINGS)
    with pytest.raises(ConfigurationError, match="it is a file"):
        Journal(tmp_path / "thesis.tex", SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def reopened(store: Store) -> Store:
    return Store(store.journal, store.job, store.prompt_ids)


def test_every_response_is_missing_until_it_is_there(store):
    sampled = Series(store, "fp16")
    assert sampled.missing == [("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1), ("1", 2)]
    sampled.record(Response("0", 1, 1, token_ids=(9,), log_probs=(-1.0,)))
    for each in (store, reopened(store)):
        again = Series(each, "fp16")
        assert ("0", 1) not in again.missing and again.done == 1
        assert Series(each, "bf16").missing == Series(each, "fp16", "fp16").missing == store.keys


def test_requests_of_a_sample_and_of_its_score(store):
    sample = Series(store, "fp16").next_requests(9)[5]
    assert sample == SampleRequest("1", 2, (7,), max_tokens=40, seed=response_seed(0, "1", 2))
    assert Series(store, "bf16").next_requests(9)[5] == sample, "the same seed in every dtype"
    for key in store.keys:
        Series(store, "fp16").record(Response(*key, 2, token_ids=(8, 9), log_probs=(-1.0, -2.0)))
    scores = Series(store, "fp16", "bf16")
    assert scores.next_requests(5)[0] == SampleRequest("0", 0, (5, 6), response_token_ids=(8, 9))
    assert scores.next_requests(5) == [SampleRequest("1", 2, (7,), response_token_ids=(8, 9))], "each once"


def test_every_fp32_log_prob_comes_back_exactly(store):
    generator = np.random.default_rng(0)
    values = np.append(-np.exp(generator.uniform(-40, 4, 2000)), [np.nan, -np.inf, 0]).astype(np.float32)
    for train in (None, "fp16"):
        Series(store, "fp16", train).record(Response("0", 0, len(values), log_probs=tuple(values.tolist())))
    store.keys = [("0", 0)]
    lengths, pi, mu = store.log_probs("fp16", "fp16")
    assert lengths.tolist() == [2003]
    np.testing.assert_array_equal(pi.astype(np.float32), values)
    np.testing.assert_array_equal(pi, mu)


def test_a_score_of_another_response_is_refused(store):
    store.keys = [("0", 0)]
    for train, log_probs in ((None, (-1.0, -2.0, -3.0)), ("fp16", (-1.0,))):
        Series(store, "fp16", train).record(Response("0", 0, len(log_probs), log_probs=log_probs))
    with pytest.raises(CheckpointStateError, match="response 0 to prompt 0 has 3 tokens in fp16, and 1 scores in fp16"):
        store.log_probs("fp16", "fp16")


def test_a_damaged_record_is_refused(store):
    store.journal.append({"rollout": "fp16", "problem": "0", "response": 0})
    with pytest.raises(CheckpointStateError, match="line 2: it is no JSON object with .*log_probs"):
        reopened(store)
