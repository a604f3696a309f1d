"""What verl's agent loop sends with a recipe's stop strings, and how it begins a prompt of a Llama."""

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


def test_a_response_ends_with_the_stop_string_and_a_prompt_begins_once(tokenizer):
    answer = TokenOutput(token_ids=[3, 2], log_probs=[-0.5, -0.1], stop_reason="completed")
    server, sampling = SimpleNamespace(generate=AsyncMock(return_value=answer)), {"temperature": 0.6, "top_p": 0.95}

    async def run():
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}, "data": {}})
        data = {"dataset_cls": SimpleNamespace, "data_config": DictConfigWrap(config.data)}
        model = {"tokenizer": tokenizer, "processor": None, "hf_model_type": "llama"}
        loop = PrecisionAgentLoop(trainer_config=DictConfigWrap(config), server_manager=server, **model, **data)
        return await loop.run(sampling, raw_prompt=[{"role": "user", "content": "1+1="}])

    output, request = asyncio.run(run()), server.generate.call_args.kwargs
    assert request["sampling_params"] == {**sampling, "stop": ["</answer>"], "include_stop_str_in_output": True}
    assert sampling == {"temperature": 0.6, "top_p": 0.95}, "the caller's own"
    assert request["prompt_ids"] == output.prompt_ids == [BEGIN, WORDS["1+1="]]
    assert (output.response_ids, output.response_mask) == ([3, WORDS["</answer>"]], [1, 1])
