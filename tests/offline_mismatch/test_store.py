"""Samples and scores come back as they were, and what is in the journal is not done again."""

import numpy as np
import pytest
from made import PROMPTS, fill, job_of

from verl_precision.errors import CheckpointStateError
from verl_precision.offline_mismatch.store import Store
from verl_precision.sampling.engine import Request, Response, response_seed
from verl_precision.sampling.journal import Journal, open_journal


def reopened(store: Store) -> Store:
    path = store._journal.path
    return Store(Journal(path, path.open("rb"), False), store.job, PROMPTS)


def test_every_response_is_missing_until_it_is_there(store):
    assert store.missing("fp16", None) == store.keys == [("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1), ("1", 2)]
    store.add("fp16", None, Response("0", 1, 1, token_ids=(9,), log_probs=(-1.0,)))
    for each in (store, reopened(store)):
        assert ("0", 1) not in each.missing("fp16", None) and each.count("fp16", None) == 1
        assert each.missing("bf16", None) == each.missing("fp16", "fp16") == store.keys


def test_requests_of_a_sample_and_of_its_score(store):
    sample = store.request("fp16", None, "1", 2)
    assert (sample.prompt_token_ids, sample.max_tokens, sample.seed) == ((7,), 40, response_seed(0, "1", 2))
    assert store.request("bf16", None, "1", 2) == sample, "the same seed in every dtype"
    store.add("fp16", None, Response("1", 2, 2, token_ids=(8, 9), log_probs=(-1.0, -2.0)))
    assert store.request("fp16", "bf16", "1", 2) == Request("1", 2, (7,), response_token_ids=(8, 9))


def test_every_fp32_log_prob_comes_back_exactly(store):
    generator = np.random.default_rng(0)
    values = -np.exp(generator.uniform(-40, 4, 2000)).astype(np.float32)
    values = np.append(values, [np.nan, -np.inf, 0]).astype(np.float32)
    for train in (None, "fp16"):
        store.add("fp16", train, Response("0", 0, len(values), log_probs=tuple(values.tolist())))
    lengths, pi, mu = reopened(store).log_probs("fp16", "fp16", [("0", 0)])
    assert lengths.tolist() == [2003]
    np.testing.assert_array_equal(pi.astype(np.float32), values)
    np.testing.assert_array_equal(pi, mu)


def test_a_score_of_another_response_is_refused(store):
    fill(store)
    store.add("fp16", "fp16", Response("0", 0, 1, log_probs=(-1.0,)))
    with pytest.raises(CheckpointStateError, match="response 0 to prompt 0 has 3 tokens in fp16, and 1 scores in fp16"):
        store.log_probs("fp16", "fp16", store.keys)


def test_a_damaged_record_is_refused(tmp_path):
    journal = open_journal(tmp_path, {})
    journal.append({"rollout": "fp16", "problem": "0", "response": 0})
    with pytest.raises(CheckpointStateError, match="line 2: log_probs is None"):
        Store(journal, job_of(), PROMPTS)
    journal.close()
