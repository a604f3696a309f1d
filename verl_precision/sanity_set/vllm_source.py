"""One vLLM engine: responses are handed over one by one, as they end, and new ones take their place at once."""

import os
from collections.abc import Sequence
from typing import Any

from verl_precision.sanity_set.source import Request, Response

# On a CPU: compiling costs more than it saves, memory is the machine's own, of which a small part is enough, and vLLM
# 0.28 cannot cut a prompt in two: it would rewind the request's random generator ("CPU Generator does not use offset").
_CPU_SETTINGS: dict[str, Any] = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "enable_chunked_prefill": False}
_CPU_KV_CACHE = "1"  # GiB


class VllmSource:
    """A `vllm.LLM`, driven request by request."""

    def __init__(self, model: str, dtype: str, max_model_len: int, temperature: float = 1.0, **engine: Any) -> None:
        """Load the model.

        Args:
            model: folder or hub name.
            dtype: as vLLM names it: float16, bfloat16, float32.
            max_model_len: longest prompt and response together, in tokens.
            temperature: of the draw; top_p is 1 and top_k off, so that responses come from the policy itself.
            engine: further settings of `vllm.LLM`.
        """
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM
        from vllm.platforms import current_platform

        settings = dict(engine)
        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE)
            settings = {**_CPU_SETTINGS, **engine}
        # generation_config="vllm": a model's own generation_config.json may set top_k or top_p.
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            generation_config="vllm",
            disable_log_stats=True,
            **settings,
        )
        self._temperature = temperature
        self._asked: dict[str, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; the engine batches them as it sees fit."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            key = f"{request.problem}/{request.response}"
            self._asked[key] = request
            parameters = SamplingParams(
                temperature=self._temperature,
                top_p=1.0,
                top_k=0,
                max_tokens=request.max_tokens,
                seed=request.seed,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
            self._llm.llm_engine.add_request(key, prompt, parameters)

    def poll(self) -> list[Response]:
        """Step the engine until at least one response has ended."""
        ready: list[Response] = []
        while not ready and self._asked:
            for output in self._llm.llm_engine.step():
                if output.finished:
                    request = self._asked.pop(output.request_id)
                    drawn = output.outputs[0]
                    ready.append(Response(request.problem, request.response, drawn.text, len(drawn.token_ids)))
        return ready

    def close(self) -> None:
        """Drop what is still being drawn."""
        if self._asked:
            self._llm.llm_engine.abort_request(list(self._asked))
            self._asked.clear()
