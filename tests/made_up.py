"""Engines that are made up, in place of vLLM and the trainer: each job draws and scores with them in milliseconds."""

from collections.abc import Callable
from functools import cache

from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.engines.model import load_tokenizer

_tokenizer = cache(load_tokenizer)


def bf16_rounds(name: str) -> tuple[float, ...]:
    """BF16 alone moves a log-prob; vLLM and the trainer do it in the same way."""
    return (-1.0, -2.0) if name.endswith("fp32") else (-1.01, -1.99)


def two_tokens(name: str, request: SampleRequest, log_probs: Callable = bf16_rounds) -> Response:
    """Draw or score two tokens; the seed chooses the first one."""
    drawn = None if request.response_token_ids else (request.seed % 500, 7)
    return Response(request.problem, request.response, 2, token_ids=drawn, log_probs=log_probs(name))


def six_characters(name: str, request: SampleRequest) -> Response:
    """Draw a text of which each character is a token: the seed decides two digits in it."""
    tokenizer = _tokenizer("tiny:qwen3")
    ids = tokenizer(f"={request.seed % 3}==={request.seed % 2}")["input_ids"][: request.max_tokens]
    text = tokenizer.decode(ids)
    return Response(request.problem, request.response, len(ids), text, token_ids=tuple(ids), finish_reason="stop")


class MadeUp:
    """Starts engines that answer one request at a time, and die after so many.

    Attributes:
        answer: Answers a request to an engine of a name.
        lives: Number of responses after which an engine is interrupted; 0 for never.
        seen: What was answered since it was last cleared: name of the engine, what was left in its queue, request.
    """

    def __init__(self, answer: Callable[[str, SampleRequest], Response] = two_tokens) -> None:
        self.answer, self.lives = answer, 0
        self.seen: list[tuple[str, int, SampleRequest]] = []

    def start(self, build, name, logs):
        """Take the place of `EngineProcess`."""
        return _Engine(self, name)

    @property
    def requests(self) -> list[tuple[str, SampleRequest]]:
        """Every request that was answered, and the name of the engine."""
        return [(name, request) for name, _, request in self.seen]


class _Engine:
    def __init__(self, made_up: MadeUp, name: str) -> None:
        self.made_up, self.name, self.asked = made_up, name, []

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        made_up = self.made_up
        if made_up.lives and len(made_up.seen) >= made_up.lives:
            raise KeyboardInterrupt
        if not self.asked:
            return []
        request = self.asked.pop(0)
        made_up.seen.append((self.name, len(self.asked), request))
        return [made_up.answer(self.name, request)]

    def close(self):
        """Nothing is held."""
