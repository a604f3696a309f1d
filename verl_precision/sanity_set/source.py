"""Where responses come from: what the loop asks of an engine, and responses recorded before."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from verl_precision.errors import ConfigurationError
from verl_precision.sanity_set.journal import read_lines


@dataclass(frozen=True)
class Request:
    """A response to draw.

    Attributes:
        problem: identifier of the problem.
        response: index of the response, from 0.
        prompt_token_ids: the prompt, in tokens.
        max_tokens: the most to generate.
        seed: of this response alone.
    """

    problem: str
    response: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Response:
    """A response drawn; `correct` only where it was recorded with its verdict."""

    problem: str
    response: int
    text: str | None
    tokens: int
    correct: bool | None = None


class Source(Protocol):
    """Draws responses, many at a time, each when it is ready."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on; returns at once."""

    def poll(self) -> list[Response]:
        """Wait until at least one response is ready; return those that are."""

    def close(self) -> None:
        """Give back what the source holds."""


def response_seed(seed: int, problem: str, response: int) -> int:
    """Return the seed of one response: the same whatever is drawn beside it, and whenever.

    Args:
        seed: of the whole run.
        problem: identifier.
        response: index.

    Returns:
        From 0 to 2³¹ - 1.
    """
    return int.from_bytes(sha256(f"{seed}/{problem}/{response}".encode()).digest()[:4], "big") >> 1


class RecordedSource:
    """Replays responses from a file: a journal of another run, or any file of such lines."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Args:
            path: JSONL with problem, response, tokens, and either correct or text.

        Raises:
            ConfigurationError: for a missing file, or a line without these fields.
        """
        if not path.is_file():
            raise ConfigurationError(f"--responses {path}: no such file. Allowed: a journal.jsonl of this command.")
        self._path = path
        self._recorded: dict[tuple[str, int], Response] = {}
        self._waiting: deque[Response] = deque()
        for number, line in enumerate(read_lines(path), start=1):
            if "settings" not in line:
                response = self._response(number, line)
                self._recorded[response.problem, response.response] = response

    def submit(self, requests: Sequence[Request]) -> None:
        """Look each up.

        Raises:
            ConfigurationError: if one was not recorded.
        """
        for request in requests:
            if (request.problem, request.response) not in self._recorded:
                raise ConfigurationError(
                    f"--responses {self._path}: response {request.response} to problem {request.problem} is not in it. "
                    "Allowed: as many recorded responses to each problem as its verdict needs. Record with "
                    "--all-responses, of the same data set."
                )
            self._waiting.append(self._recorded[request.problem, request.response])

    def poll(self) -> list[Response]:
        """Return everything asked for since."""
        ready = list(self._waiting)
        self._waiting.clear()
        return ready

    def close(self) -> None:
        """Nothing is held."""

    def _response(self, number: int, line: dict[str, Any]) -> Response:
        types = {"problem": (str,), "response": (int,), "tokens": (int,)}
        types |= {"text": (str,)} if "correct" not in line else {"correct": (bool,)}
        for name, kinds in types.items():
            if type(line.get(name)) not in kinds:
                raise ConfigurationError(
                    f"--responses {self._path}, line {number}: {name} is {line.get(name)!r}. Allowed: problem, "
                    "response, tokens, and correct or text. Record it with this command."
                )
        return Response(line["problem"], line["response"], line.get("text"), line["tokens"], line.get("correct"))
