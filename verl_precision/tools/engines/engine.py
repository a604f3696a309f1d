"""Requests, responses and settings of an engine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class _OfResponse:
    problem: str  # identifier of the problem
    response: int  # index of the response, from 0

    @property
    def key(self) -> tuple[str, int]:
        """Problem and index of the response."""
        return self.problem, self.response


@dataclass(frozen=True)
class SampleRequest(_OfResponse):
    """A request to draw a response, or with `response_token_ids` to score one."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int = 0  # most tokens to generate
    seed: int = 0  # of this response only
    response_token_ids: tuple[int, ...] = ()
    routed_experts: Any = None  # to replay: NumPy int16 [tokens, layers, top_k], without the last token


@dataclass(frozen=True)
class Response(_OfResponse):
    """The answer of an engine; fields that were not requested are None."""

    length: int  # number of its tokens
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    log_probs: Any = None  # one for each token, in nats: a sequence, or an array of NumPy
    finish_reason: str | None = None  # why the response ended, in vLLM's words
    routed_experts: Any = None  # which experts computed each token of prompt and response, as in `SampleRequest`


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """How vLLM draws or scores; by default it draws from the policy itself."""

    model: str  # as in `find_model`
    dtype: str
    max_model_len: int  # most tokens of prompt and response together
    log_probs: bool = False  # whether to return each token's log-prob; otherwise the text is returned
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    divide_logits_by: float = 1.0  # a temperature for scores too; vLLM's own applies only to drawn tokens
    arithmetic: str | None = None  # of vLLM's operations; None: the process's own
    more: Mapping[str, Any] = field(default_factory=dict)  # further settings of `vllm.LLM`, such as logprobs_mode


@dataclass(frozen=True, kw_only=True)
class ScorerSettings:
    """How verl's engine scores."""

    model: str  # as in `find_model`
    dtype: str  # of the forward: bf16, fp16 or fp32
    attention: str  # sdpa, flash_attention_2, or another that is registered with transformers
    micro_batch_tokens: int  # of one forward, padding included
    packed: bool = False  # whether sequences have no padding
    fp32_log_probs: bool = True  # computed in FP32, as this package's engine does
    fp32_output_head: bool = False  # whether the logits are computed in FP32, too
    temperature: float = 1.0
    # verl's mode for a mixture of experts. R2: the response has the experts that the routers choose. R3: the routers
    # use the experts of the request.
    router_replay: str = "disabled"
    arithmetic: str | None = None  # of the operations; None: the process's own


def prepare_process(arithmetic: str | None = None) -> bool:
    """Set the environment variables of verl and vLLM, before their import; return whether there is a GPU."""
    import torch

    from verl_precision.engine.arithmetic_choice import VARIABLE

    os.environ.update({} if arithmetic is None else {VARIABLE: arithmetic})
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's default is half of the memory
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM runs in this process and leaves no other behind
    return on_gpu
