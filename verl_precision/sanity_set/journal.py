"""Every response drawn, on disk before it counts: a run killed at any moment goes on where it was.

One JSON object a line, appended. The first holds the settings; the others one response each. Lines that are complete
are kept; a torn last line (killed while writing) is cut off, so that its response is drawn again.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from verl_precision.errors import CheckpointStateError, ConfigurationError


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        problem: identifier of the problem.
        response: its index, from 0.
        correct: what the reward function said.
        tokens: its length.
        text: the response itself, where asked for.
    """

    problem: str
    response: int
    correct: bool
    tokens: int
    text: str | None = None


class Journal:
    """The file, open for this process alone."""

    def __init__(self, file: TextIO, samples: list[Sample], torn: bool) -> None:
        """Wrap an open file; use `open_journal`."""
        self._file = file
        self.samples = samples
        self.torn = torn

    def append(self, sample: Sample) -> None:
        """Write a response; it survives the end of this process."""
        content = {key: value for key, value in asdict(sample).items() if value is not None}
        self._file.write(json.dumps(content, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file and let others have it."""
        self._file.close()


def open_journal(path: Path, settings: Mapping[str, Any]) -> Journal:
    """Open a journal to go on with, or begin one.

    Args:
        path: the file.
        settings: everything that decides which responses are drawn and how they are judged; JSON values.

    Returns:
        The journal, with the responses it holds.

    Raises:
        ConfigurationError: if it was begun with other settings, or another process has it open.
        CheckpointStateError: if it is damaged anywhere but in its last line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8", newline="\n")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigurationError(
            f"{path}: another process is writing it. Wait for it, or give another --output."
        ) from None
    try:
        torn = _cut_torn_line(path, file)
        lines = list(read_lines(path))
        if lines:
            _require_same(path, lines[0].get("settings"), settings)
        else:
            file.write(json.dumps({"settings": settings}) + "\n")
            file.flush()
        return Journal(file, [as_sample(path, number, line) for number, line in enumerate(lines[1:], start=2)], torn)
    except BaseException:
        file.close()
        raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of each complete line.

    Raises:
        CheckpointStateError: for a line that is not a JSON object.
    """
    with path.open(encoding="utf-8", errors="strict") as content:
        for number, line in enumerate(content, start=1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise CheckpointStateError(
                    f"{path}, line {number}: not a JSON object: {line[:60]!r}. Only a last line may be torn, and it is "
                    "cut off. Restore the file, or start again in a new --output."
                )
            yield value


def as_sample(path: Path, number: int, line: Mapping[str, Any]) -> Sample:
    """Return the response that a line describes.

    Raises:
        CheckpointStateError: if a field is missing or of another type.
    """
    types = {"problem": str, "response": int, "correct": bool, "tokens": int}
    for name, kind in types.items():
        if type(line.get(name)) is not kind:
            raise CheckpointStateError(
                f"{path}, line {number}: {name} is {line.get(name)!r}. Allowed: {kind.__name__}. Restore the file, or "
                "start again in a new --output."
            )
    return Sample(line["problem"], line["response"], line["correct"], line["tokens"], line.get("text"))


def _cut_torn_line(path: Path, file: TextIO) -> bool:
    """Cut off what follows the last newline; return whether there was something."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete == len(content):
        return False
    os.truncate(file.fileno(), complete)
    return True


def _require_same(path: Path, recorded: Any, settings: Mapping[str, Any]) -> None:
    if not isinstance(recorded, dict):
        raise CheckpointStateError(f"{path}, line 1: no settings. It is not a journal of this command; move it away.")
    now = json.loads(json.dumps(settings))
    differ = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
    if differ:
        changes = "; ".join(f"{name}: {recorded.get(name)!r} there, {now.get(name)!r} now" for name in differ)
        raise ConfigurationError(
            f"{path} was begun with other settings ({changes}). Responses of both would not be one experiment. "
            "Give the settings it was begun with, or a new --output."
        )
