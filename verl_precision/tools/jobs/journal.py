"""The journal of a job: each response is written before it counts, so a killed job continues where it stopped.

Each line is one JSON object: the first has the settings, every other line one response. Complete lines are kept. If
the job was killed while it wrote, the incomplete last line is cut off, and its response is done again.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.files import require_regular

JOURNAL = "journal.jsonl"
_SHOWN = 120  # characters of a setting in a message
START_AGAIN = "Restore the file, or start again in a new --output."
Key = tuple[str, int]  # (problem, index of the response)


class Journal:
    """The journal's file, locked for this process."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open the journal of a job to continue the job, or create the journal and its folder.

        `settings` are everything that decides which responses are drawn and how they are judged, as JSON values. A
        folder with other content or settings, or with another process at work, is a `ConfigurationError`; a file that
        is no journal is a `CheckpointStateError`.
        """
        self.path = folder / JOURNAL
        require_regular(self.path)
        if not self.path.exists():
            _require_free(folder)
            folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as closed_on_error:
            self._file = closed_on_error.enter_context(open(self.path, "a+b"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "Wait for it, or give another --output."
                raise ConfigurationError(f"{self.path}: another process is writing it", remedy=remedy) from None
            self._file.seek(0)
            lines = [len(line) for line in self._file if line.endswith(b"\n")]
            self.resumed, complete = len(lines) - 1, sum(lines)  # records of earlier processes
            self.torn = self._file.seek(0, os.SEEK_END) > complete  # whether the last line is incomplete
            if self.torn:  # a complete file is not changed
                self._file.truncate(complete)
            if complete:
                self._require_same(json.loads(json.dumps(settings)))
            else:
                self.append({"settings": settings})
            closed_on_error.pop_all()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record without its None values; the record survives if this process is killed."""
        content = {key: value for key, value in record.items() if value is not None}
        self._file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def records(self, fields: Mapping[str, type]) -> Iterator[dict[str, Any]]:
        """Yield each record; raise an error for a record without these fields of these types."""
        with self.path.open("rb") as content:
            for number, line in islice(enumerate(content, start=1), 1, None):
                yield self._record(number, line, fields)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def _record(self, number: int, line: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
        """Return the JSON object of a line; raise an error if it lacks one of these fields."""
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or any(type(record.get(name)) is not kind for name, kind in fields.items()):
            problem = f"it is no JSON object with {', '.join(fields)} of the right types: {line[:60]!r}"
            raise CheckpointStateError(f"{self.path}, line {number}: {problem}", remedy=START_AGAIN)
        return record

    def _require_same(self, now: Mapping[str, Any]) -> None:
        with self.path.open("rb") as content:
            then = self._record(1, content.readline(), {"settings": dict})["settings"]
        changes = "; ".join(
            f"{name}: {repr(then.get(name))[:_SHOWN]} there, {repr(now.get(name))[:_SHOWN]} now"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        )
        if changes:
            problem = f"{self.path} was begun with other settings ({changes}); the results of both cannot be mixed"
            raise ConfigurationError(problem, remedy="Use those settings again, or choose a new --output.")


def _require_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError("it is a file", setting="--output", value=folder, allowed="a folder")
    if found := sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []:
        problem = f"it has {found[0]} and no {JOURNAL}, so no job can be resumed in this folder; nothing was written"
        allowed = "a new folder, an empty one, or that of an earlier job"
        raise ConfigurationError(problem, setting="--output", value=folder, allowed=allowed)
