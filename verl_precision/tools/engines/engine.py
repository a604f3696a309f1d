"""What an engine is asked, what it answers, and what every engine can do."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class _OfResponse:
    problem: str  # identifier of the problem
    response: int  # index of the response, from 0

    @property
    def key(self) -> tuple[str, int]:
        """Problem and index of the response."""
        return self.problem, self.response


@dataclass(frozen=True)
class Request(_OfResponse):
    """A response to draw, or with `response_token_ids` one to score."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int = 0  # most tokens to generate
    seed: int = 0  # of this response alone
    response_token_ids: tuple[int, ...] = ()
    record_to: str = ""  # a file for what every operation of the forward gets and gives
    vocabulary: str = ""  # a file of all log-probs [tokens, V]: written when drawn, compared when scored
    routed_experts: Any = None  # to replay: int16 [tokens, layers, top_k] of NumPy, without the last token's


@dataclass(frozen=True)
class Response(_OfResponse):
    """What an engine answers; what was not asked for is None."""

    length: int  # number of its tokens
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None  # one for each token, in nats
    finish_reason: str | None = None  # why the response ended, in vLLM's words
    routed_experts: Any = None  # which experts computed each token of prompt and response, as in `Request`
    equal: tuple[int, int] | None = None  # log-probs equal to those in the file of the vocabulary, and all


class Engine(Protocol):
    """Answers requests, many at a time, each when it is ready.

    What loads a model (`vllm_sampler`, `fsdp_scorer`) has `submit` and `poll` alone: it runs in a process of its own,
    whose end gives everything back.
    """

    engines: int  # number of engines that share the work

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on and return at once."""

    def poll(self) -> list[Response]:
        """Wait until at least one response is ready, and return those that are; return none if nothing is asked."""

    def close(self) -> None:
        """Give back what the engine holds."""


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
