"""Responses recorded before, replayed in place of an engine."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_precision.errors import ConfigurationError
from verl_precision.sampling.engine import Request, Response
from verl_precision.sampling.journal import read_lines, wrong_field


class RecordedEngine:
    """Replays responses from a file: a journal of another job, or any file of such lines."""

    engines = 1

    def __init__(self, path: Path) -> None:
        """Read the file.

        Args:
            path: JSONL with problem, response, tokens, and either correct or text.

        Raises:
            ConfigurationError: If a line lacks these fields.
        """
        self._path = path
        self._recorded: dict[tuple[str, int], Response] = {}
        self._waiting: deque[Response] = deque()
        for number, _, line in read_lines(path):
            if "settings" not in line:
                response = self._response(number, line)
                self._recorded[response.problem, response.response] = response

    def submit(self, requests: Sequence[Request]) -> None:
        """Look each up.

        Raises:
            ConfigurationError: If one was not recorded.
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
        fields: dict[str, type] = {"problem": str, "response": int, "tokens": int}
        if wrong := wrong_field(line, fields | ({"correct": bool} if "correct" in line else {"text": str})):
            raise ConfigurationError(
                f"--responses {self._path}, line {number}: {wrong}. Needed: problem, response, tokens, and correct or "
                "text. Record it with this command."
            )
        return Response(line["problem"], line["response"], line["tokens"], line.get("text"), line.get("correct"))
