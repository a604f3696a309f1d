"""A rollout server as a Ray actor, with the contract of verl's `generate`; it imports nothing heavy."""

import asyncio
import os
from types import SimpleNamespace

import ray

LOG_PROB = -5.0


@ray.remote
class Server:
    """Answers -5 for every token of a prompt, or of its continuation; or misbehaves."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour, self.seen = behaviour, []

    async def generate(self, prompt_ids, sampling_params, request_id):
        if self.behaviour == "hangs":
            await asyncio.Event().wait()
        if self.behaviour == "dies":
            os._exit(1)
        if self.behaviour == "raises":
            raise RuntimeError("engine core is dead")
        if sampling_params == {"max_tokens": 1}:  # whether a cache answers
            self.seen.append(prompt_ids)
            cached = 16 if self.behaviour == "keeps its cache" and self.seen.count(prompt_ids) > 1 else 0
            return SimpleNamespace(token_ids=[1], log_probs=None, extra_fields={"num_cached_tokens": cached})
        if self.behaviour == "continues":
            written = sampling_params.pop("max_tokens")
            assert sampling_params == {"logprobs": True, "temperature": 0.0, "ignore_eos": True}
            return SimpleNamespace(token_ids=[7] * written, log_probs=[LOG_PROB] * written, extra_fields={})
        assert sampling_params == {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}
        extra = {} if self.behaviour == "has none" else {"prompt_logprobs": [[LOG_PROB]] * len(prompt_ids)}
        return SimpleNamespace(token_ids=[1], log_probs=None, extra_fields=extra)
