"""What is used of vLLM's engine is still there; the engine itself runs in tests/e2e."""

import inspect


def test_engine_takes_requests_and_gives_back_responses_as_they_end():
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.llm_engine import LLMEngine

    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:4] == ["request_id", "prompt", "params"]
    assert list(inspect.signature(LLMEngine.step).parameters) == ["self"]
    assert tokens_input([1, 2]) == {"type": "token", "prompt_token_ids": [1, 2]}
