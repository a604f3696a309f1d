"""Samples and scores come back as they were, and what is in the journal is not done again."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from verl_precision.base.errors import CheckpointStateError
from verl_precision.base.seeds import response_seed
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.jobs.journal import Journal
from verl_precision.tools.jobs.store import Series, Store

PROMPTS = [(5, 6), (7,)]


@pytest.fixture
def store(tmp_path):
    job = SimpleNamespace(responses=3, max_response_tokens=40, seed=0)
    with closing(Journal(tmp_path / "job", {})) as journal:
        yield Store(journal, job, PROMPTS)


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
    assert sample == Request("1", 2, (7,), max_tokens=40, seed=response_seed(0, "1", 2))
    assert Series(store, "bf16").next_requests(9)[5] == sample, "the same seed in every dtype"
    for key in store.keys:
        Series(store, "fp16").record(Response(*key, 2, token_ids=(8, 9), log_probs=(-1.0, -2.0)))
    scores = Series(store, "fp16", "bf16")
    assert scores.next_requests(5)[0] == Request("0", 0, (5, 6), response_token_ids=(8, 9))
    assert scores.next_requests(5) == [Request("1", 2, (7,), response_token_ids=(8, 9))], "each once"


def test_every_fp32_log_prob_comes_back_exactly(store):
    generator = np.random.default_rng(0)
    values = -np.exp(generator.uniform(-40, 4, 2000)).astype(np.float32)
    values = np.append(values, [np.nan, -np.inf, 0]).astype(np.float32)
    for train in (None, "fp16"):
        Series(store, "fp16", train).record(Response("0", 0, len(values), log_probs=tuple(values.tolist())))
    lengths, pi, mu = reopened(store).log_probs("fp16", "fp16", [("0", 0)])
    assert lengths.tolist() == [2003]
    np.testing.assert_array_equal(pi.astype(np.float32), values)
    np.testing.assert_array_equal(pi, mu)


def test_a_score_of_another_response_is_refused(store):
    for train, log_probs in ((None, (-1.0, -2.0, -3.0)), ("fp16", (-1.0,))):
        Series(store, "fp16", train).record(Response("0", 0, len(log_probs), log_probs=log_probs))
    with pytest.raises(CheckpointStateError, match="response 0 to prompt 0 has 3 tokens in fp16, and 1 scores in fp16"):
        store.log_probs("fp16", "fp16", [("0", 0)])


def test_a_damaged_record_is_refused(store):
    store.journal.append({"rollout": "fp16", "problem": "0", "response": 0})
    with pytest.raises(CheckpointStateError, match="line 2: log_probs is None"):
        reopened(store)
