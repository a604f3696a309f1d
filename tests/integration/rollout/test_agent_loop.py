"""What verl's agent loop sends with a recipe's stop strings, how it begins a prompt of a Llama, and what it marks."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from verl_precision.integration.rollout.agent_loop import PrecisionAgentLoop

RECIPE = OmegaConf.load(Path(__file__).parents[3] / "recipes" / "octothinker" / "octothinker.yaml")
ROLLOUT = {**RECIPE.actor_rollout_ref.rollout, "prompt_length": 16, "response_length": 4, "full_determinism": False}
BEGIN, WORDS = 0, {"<|begin_of_text|>": 0, "1+1=": 1, "</answer>": 2, "?": 3}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that, as Llama's, puts its begin of text before whatever it is given."""
    words = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", BEGIN)]
    )
    found = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|begin_of_text|>", unk_token="?")
    assert found("1+1=").input_ids == [0, 1]
    found.chat_template = RECIPE.actor_rollout_ref.model.custom_chat_template
    return found


def answered(tokenizer, token_ids, rollout=ROLLOUT, sampling=None):
    """Return what the loop makes of a server's answer, and what it asked the server for."""
    answer = TokenOutput(token_ids=token_ids, log_probs=[-0.5] * len(token_ids), stop_reason="completed")
    server = SimpleNamespace(generate=AsyncMock(return_value=answer))

    async def run():
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
        data = {"dataset_cls": SimpleNamespace, "data_config": DictConfigWrap(config.data)}
        model = {"tokenizer": tokenizer, "processor": None, "hf_model_type": "llama"}
        loop = PrecisionAgentLoop(trainer_config=DictConfigWrap(config), server_manager=server, **model, **data)
        return await loop.run(sampling or {"temperature": 1.0}, raw_prompt=[{"role": "user", "content": "1+1="}])

    return asyncio.run(run()), server.generate.call_args.kwargs


def test_a_response_ends_with_the_stop_string_and_a_prompt_begins_once(tokenizer):
    sampling = {"temperature": 0.6, "top_p": 0.95}
    output, request = answered(tokenizer, [3, 2], sampling=sampling)
    assert request["sampling_params"] == {**sampling, "stop": ["</answer>"], "include_stop_str_in_output": True}
    assert sampling == {"temperature": 0.6, "top_p": 0.95}, "the caller's own"
    assert request["prompt_ids"] == output.prompt_ids == [BEGIN, WORDS["1+1="]]
    assert (output.response_ids, output.response_mask) == ([3, WORDS["</answer>"]], [1, 1])
    assert "truncated" not in output.extra_fields


@pytest.mark.parametrize(("token_ids", "truncated"), [([3, 3], False), ([3] * 4, True), ([3, 3, 3, 2], False)])
def test_a_reward_is_told_whether_a_response_was_cut(tokenizer, token_ids, truncated):
    """The response length is 4, and token 2 ends a response."""
    tokenizer.eos_token = "</answer>"
    output, _ = answered(tokenizer, token_ids, {**ROLLOUT, "custom": {"mark_truncated": True}})
    assert output.extra_fields["truncated"] is truncated
