"""What vLLM returns becomes a mask, and a mask reaches the micro-batch that it belongs to."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from vllm.logprobs import FlatLogprobs

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.log_probs import MASK_ANSWER_KEY, MASK_FIELD
from verl_precision.integration.engine.model_outputs import kept_tokens
from verl_precision.integration.rollout.agent_loop import MaskedOutput
from verl_precision.integration.rollout.vllm_sampling_masks import kept_of


def returned(*places: dict[int, float]) -> FlatLogprobs:
    """Return log-probs as vLLM does: the drawn token first, then the most probable ones."""
    found = FlatLogprobs()
    for place in places:
        ids = [next(iter(place)), *sorted(place, key=lambda token: -place[token])]
        found.append_fast(ids, [place[token] for token in ids], iter(range(len(ids))), [None] * len(ids))
    return found


HALF, DROPPED = float(np.log(0.5)), -np.inf


def test_kept_are_the_tokens_with_a_probability():
    counts, ids = kept_of(returned({7: HALF, 3: HALF, 4: DROPPED}, {5: 0.0, 7: DROPPED}), 2, 3)
    assert counts.tolist() == [2, 1] and sorted(ids[:2]) == [3, 7] and ids[2:] == [5]
    assert [len(part) for part in kept_of(None, 0, 3)] == [0, 0]


def test_more_kept_than_returned_is_an_error():
    with pytest.raises(ConfigurationError, match=r"0\.5000 of the probability.*top_k"):
        kept_of(returned({5: 0.0}, {7: HALF}), 2, 1)


def masked_output(response: list[int], masks: list[list[int]]) -> MaskedOutput:
    kept = np.array([len(mask) for mask in masks]), np.concatenate([np.array(mask) for mask in masks])
    tokens = {"prompt_ids": [1, 2], "response_ids": response, "response_mask": [1] * len(response)}
    return MaskedOutput(**tokens, metrics=AgentLoopMetrics(), extra_fields={MASK_ANSWER_KEY: kept, "turn_scores": []})


def test_a_sample_has_the_mask_of_its_response():
    """verl cuts a response that is too long, and with it the mask."""
    fields = masked_output([8, 9], [[8], [9, 3], [4, 5, 6]]).as_dict()
    assert fields[MASK_FIELD].tolist() == [2, 1, 2, 8, 9, 3]
    assert MASK_ANSWER_KEY not in fields["extra_fields"]


def test_a_micro_batch_has_the_masks_of_its_samples_but_not_of_padding():
    """verl's padding sample is a copy of another one, cut to one token that is not trained on."""
    mask = masked_output([8, 9], [[8], [9, 3]]).as_dict()[MASK_FIELD]

    def nested(*rows):
        return torch.nested.nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    fields = {"input_ids": nested([1, 2, 8, 9], [0, 0]), "loss_mask": nested([1, 1], [0])}
    micro_batch = TensorDict({**fields, MASK_FIELD: nested(mask, mask)}, batch_size=2)
    kept = kept_tokens(micro_batch, torch.tensor([2, 8, 9, 1, 0, 0]))
    assert kept.starts == [0, 0, 1, 3, 3, 3, 3] and kept.ids_M.tolist() == [8, 9, 3]
    assert kept_tokens(micro_batch.exclude(MASK_FIELD), torch.zeros(6)) is None
