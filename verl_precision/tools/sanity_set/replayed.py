"""Responses recorded before, replayed in place of an engine."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.jobs.journal import read_lines, wrong_field


class RecordedEngine:
    """Replays responses from a file: a journal of another job, or any file of such lines."""

    engines = 1

    def __init__(self, path: Path) -> None:
        """Read a JSONL file; a line that lacks problem, response, tokens, and correct or text is refused."""
        self._path = path
        self._recorded: dict[tuple[str, int], Response] = {}
        self._waiting: deque[Response] = deque()
        for number, _, line in read_lines(path):
            if "settings" in line:
                continue
            judged: dict[str, type] = {"correct": bool} if "correct" in line else {"text": str}
            if wrong := wrong_field(line, {"problem": str, "response": int, "tokens": int, **judged}):
                allowed = "problem, response, tokens, and correct or text, as this command records them"
                raise ConfigurationError(f"--responses {path}, line {number}: {wrong}", allowed=allowed)
            key = line["problem"], line["response"]
            self._recorded[key] = Response(*key, line["tokens"], line.get("text"), line.get("correct"))

    def submit(self, requests: Sequence[Request]) -> None:
        """Look each up; one that was not recorded is refused."""
        for request in requests:
            if request.key not in self._recorded:
                raise ConfigurationError(
                    f"--responses {self._path}: response {request.response} to problem {request.problem} is not in it",
                    allowed="as many recorded responses to each problem as its verdict needs",
                    remedy="Record with --all-responses, of the same data set.",
                )
            self._waiting.append(self._recorded[request.key])

    def poll(self) -> list[Response]:
        """Return everything asked for since."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def close(self) -> None:
        """Nothing is held."""
