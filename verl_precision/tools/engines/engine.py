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
    """A response to draw, or with `response_token_ids` one to score."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int = 0  # most tokens to generate
    seed: int = 0  # of this response alone
    response_token_ids: tuple[int, ...] = ()
    routed_experts: Any = None  # to replay: int16 [tokens, layers, top_k] of NumPy, without the last token's


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
    log_probs: bool = False  # whether the log-prob of each token is returned, else the text is
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    divide_logits_by: float = 1.0  # a temperature that scores have too; vLLM's own is of what it draws alone
    arithmetic: str | None = None  # of its operations; None: the process's own
    more: Mapping[str, Any] = field(default_factory=dict)  # further settings of `vllm.LLM`, such as logprobs_mode


@dataclass(frozen=True, kw_only=True)
class ScorerSettings:
    """How verl's engine scores."""

    model: str  # as in `find_model`
    dtype: str  # of the forward: bf16, fp16 or fp32
    attention: str  # sdpa, flash_attention_2, or another that is registered with transformers
    micro_batch_tokens: int  # of one forward, padding included
    packed: bool = False  # whether sequences have no padding
    fp32_log_probs: bool = True  # taken in FP32, as our engine does it
    fp32_output_head: bool = False  # whether the logits are computed in FP32, too
    temperature: float = 1.0
    # verl's mode of a mixture of experts: with R2 a response tells which experts its routers choose, with R3 they take
    # those of the request.
    router_replay: str = "disabled"
    arithmetic: str | None = None  # of its operations; None: the process's own


def prepare_process(arithmetic: str | None = None) -> bool:
    """Set what verl and vLLM read from the environment, before they are imported; return whether there is a GPU."""
    import torch

    from verl_precision.engine.arithmetic_choice import VARIABLE

    os.environ.update({} if arithmetic is None else {VARIABLE: arithmetic})
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's default is half of the memory
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM in this process: nothing of it outlives us
    return on_gpu
