"""Every response is on disk before it counts: a job that is killed at any moment continues where it was.

One JSON object a line, appended. The first holds the settings, the others one response each. Lines that are complete
are kept; a torn last line (killed while writing) is cut off, so that its response is done again.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from verl_precision.errors import CheckpointStateError, ConfigurationError

JOURNAL = "journal.jsonl"
_SHOWN = 120  # characters of a setting in a message


class Journal:
    """The file, open for this process alone."""

    def __init__(self, path: Path, file: BinaryIO, torn: bool) -> None:
        """Wrap an open file; use `open_journal`."""
        self.path = path
        self.torn = torn
        self._file = file

    def append(self, record: Mapping[str, Any]) -> int:
        """Write a record without what is None; it survives the end of this process. Return its position."""
        content = {key: value for key, value in record.items() if value is not None}
        position = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        return position

    def read(self, position: int) -> dict[str, Any]:
        """Return the record at a position."""
        self._file.seek(position)
        return json.loads(self._file.readline())

    def records(self, fields: Mapping[str, type]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and content of each record.

        Args:
            fields: What each record must have, and its type.

        Raises:
            CheckpointStateError: If a line is damaged, or has no such field of that type.
        """
        for number, position, record in read_lines(self.path):
            if number > 1:
                if wrong := wrong_field(record, fields):
                    raise CheckpointStateError(
                        f"{self.path}, line {number}: {wrong}. Restore the file, or start again in a new --output."
                    )
                yield position, record

    def close(self) -> None:
        """Close the file and let others have it."""
        self._file.close()


def open_journal(folder: Path, settings: Mapping[str, Any], outputs: Collection[str] | None = None) -> Journal:
    """Open the journal of a job to continue it, or begin one.

    Args:
        folder: Folder of the job; it is made.
        settings: Everything that decides which responses are drawn and how they are judged; JSON values.
        outputs: Files that the job will write. A folder that has one of them, or with None any file, and no journal,
            belongs to somebody else.

    Raises:
        ConfigurationError: If the folder is not this job's, or another process works in it.
        CheckpointStateError: If the journal is no journal.
    """
    path = folder / JOURNAL
    if not path.exists():
        _require_free(folder, outputs)
        folder.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigurationError(
            f"{path}: another process is writing it. Allowed: one process for each --output. Wait for it, or give "
            "another --output."
        ) from None
    try:
        journal = Journal(path, file, _cut_torn_line(path, file))
        first = next(read_lines(path), None)
        if first is None:
            journal.append({"settings": settings})
        else:
            _require_same(path, first[2].get("settings"), json.loads(json.dumps(settings)))
        return journal
    except BaseException:
        file.close()
        raise


def read_lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield number, position and object of each line.

    Raises:
        CheckpointStateError: If a line is not a JSON object.
    """
    position = 0
    with path.open("rb") as content:
        for number, line in enumerate(content, start=1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise CheckpointStateError(
                    f"{path}, line {number}: it is not a JSON object: {line[:60]!r}. Allowed: a torn last line alone, "
                    "which is cut off. Restore the file, or start again in a new --output."
                )
            yield number, position, value
            position += len(line)


def wrong_field(record: Mapping[str, Any], fields: Mapping[str, type]) -> str | None:
    """Say which field is missing or of another type; return None if all are right."""
    wrong = next((name for name, kind in fields.items() if type(record.get(name)) is not kind), None)
    return wrong and f"{wrong} is {record.get(wrong)!r}. Allowed: {fields[wrong].__name__}"


def _require_free(folder: Path, outputs: Collection[str] | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"--output {folder}: it is a file. Allowed: a folder. Nothing was written.")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    taken = [name for name in found if outputs is None or name in outputs]
    if taken:
        raise ConfigurationError(
            f"--output {folder}: it has {taken[0]} and no {JOURNAL}, so that no job of this version can be continued "
            "in it. Allowed: a new folder, an empty one, or that of an earlier job. Nothing was written. Give another "
            "--output; a job of an older version is finished by that version."
        )


def _cut_torn_line(path: Path, file: BinaryIO) -> bool:
    """Cut off what follows the last newline; return whether there was something."""
    size = complete = file.seek(0, os.SEEK_END)
    while complete:  # backwards in blocks: a journal may be larger than memory
        start = max(complete - (1 << 20), 0)
        file.seek(start)
        newline = file.read(complete - start).rfind(b"\n")
        complete = start + newline + 1
        if newline >= 0:
            break
    if complete == size:
        return False
    os.truncate(path, complete)
    return True


def _require_same(path: Path, recorded: Any, now: Mapping[str, Any]) -> None:
    if not isinstance(recorded, dict):
        raise CheckpointStateError(f"{path}, line 1: no settings. It is not a journal of this command; move it away.")
    differ = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
    if differ:
        changes = "; ".join(f"{name}: {_short(recorded, name)} there, {_short(now, name)} now" for name in differ)
        raise ConfigurationError(
            f"{path} was begun with other settings ({changes}). Responses of both would not be one experiment. "
            "Allowed: the settings that it was begun with. Give those, or a new --output."
        )


def _short(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings.get(name))[:_SHOWN]
