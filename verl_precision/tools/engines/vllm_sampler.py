"""Draws or scores with vLLM: each response is returned as soon as it ends, and a new one takes its place at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from verl_precision.base.dtypes import long
from verl_precision.check.rules.engine import gated_delta_nets
from verl_precision.integration.ledger import require_feature
from verl_precision.tools.engines.engine import Response, SampleRequest, SamplerSettings, prepare_process
from verl_precision.tools.engines.model import model_location

# On a CPU, compiling costs more than it saves, and a small part of the machine's memory is enough. vLLM 0.28 cannot
# split a prompt: it would rewind the request's random generator ("CPU Generator does not use offset").
_CPU_SETTINGS: dict[str, Any] = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "enable_chunked_prefill": False}


class VllmEngine:
    """A `vllm.LLM`, driven request by request."""

    def __init__(self, settings: SamplerSettings) -> None:
        """Load a model."""
        cpu_settings = {} if prepare_process(settings.arithmetic) else _CPU_SETTINGS
        import verl  # noqa: F401 - loads the plugin, which lets vLLM detect a CPU
        from transformers import PretrainedConfig
        from vllm import LLM

        require_feature("sampling engine")
        location = model_location(settings.model)
        if cpu_settings:
            config = PretrainedConfig.get_config_dict(location)[0]
            if gated_delta_nets(config):  # vLLM caches their states only at the borders of chunks
                cpu_settings = {**cpu_settings, "enable_prefix_caching": False}
            if set(config.get("layer_types") or ()) == {"sliding_attention"}:
                cpu_settings = {**cpu_settings, "block_size": 16}  # vLLM 0.28 ends with an error at its default of 128
        llm = LLM(
            model=location, dtype=long(settings.dtype), max_model_len=settings.max_model_len, disable_log_stats=True,
            **{"logprobs_mode": "processed_logprobs", **settings.more, **cpu_settings},  # verl's mode
        )  # fmt: skip
        if settings.divide_logits_by != 1:
            llm.apply_model(partial(_divide_logits, by=settings.divide_logits_by))
        self._engine, self._settings = llm.llm_engine, settings
        self._asked: dict[str, SampleRequest] = {}

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests; the engine batches them as it sees fit."""
        for request in requests:
            key = f"{request.problem}/{request.response}"
            self._asked[key] = request
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids + request.response_token_ids)}
            self._engine.add_request(key, prompt, self._sampling_params(request))

    def _sampling_params(self, request: SampleRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        when = RequestOutputKind.FINAL_ONLY
        if request.response_token_ids:  # vLLM scores prompts, at temperature 1
            return SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=when)
        return SamplingParams(
            temperature=self._settings.temperature, top_p=self._settings.top_p, top_k=self._settings.top_k,
            max_tokens=request.max_tokens, seed=request.seed, output_kind=when,
            logprobs=0 if self._settings.log_probs else None,  # 0: only of the sampled token
            detokenize=not self._settings.log_probs,
        )  # fmt: skip

    def poll(self) -> list[Response]:
        """Step the engine until at least one response has ended."""
        ready: list[Response] = []
        while not ready and self._asked:
            for output in self._engine.step():
                if output.finished:
                    request = self._asked.pop(output.request_id)
                    answer = self._scored if request.response_token_ids else self._drawn
                    ready.append(answer(request, output))
        return ready

    def _drawn(self, request: SampleRequest, output: Any) -> Response:
        drawn = output.outputs[0]
        ids, text, log_probs = tuple(drawn.token_ids), drawn.text, None
        if self._settings.log_probs:
            text, log_probs = None, tuple(at[token].logprob for at, token in zip(drawn.logprobs, ids, strict=True))
        experts = _experts(drawn, len(request.prompt_token_ids + ids))
        of_tokens: dict[str, Any] = {"token_ids": ids, "log_probs": log_probs, "routed_experts": experts}
        return Response(*request.key, len(ids), text, finish_reason=drawn.finish_reason, **of_tokens)

    def _scored(self, request: SampleRequest, output: Any) -> Response:
        ids = request.response_token_ids
        places = output.prompt_logprobs[len(request.prompt_token_ids) :]
        log_probs = tuple(at[token].logprob for at, token in zip(places, ids, strict=True))
        experts = _experts(output.outputs[0], len(request.prompt_token_ids + ids))
        return Response(*request.key, len(ids), log_probs=log_probs, routed_experts=experts)


def _experts(output: Any, length: int) -> Any:
    """Return the experts of all tokens of a sequence but the last, which affect no log-prob; None if not recorded."""
    experts = output.routed_experts
    return None if experts is None else experts[: length - 1].astype("int16")


def _divide_logits(model: Any, by: float) -> None:
    """Make a vLLM model return logits divided by a temperature, in FP32 as vLLM's sampler divides them."""
    compute_logits = model.compute_logits
    model.compute_logits = lambda *args, **kwargs: compute_logits(*args, **kwargs).float() / by
