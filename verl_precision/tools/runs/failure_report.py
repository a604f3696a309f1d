"""Why a run failed, in at most ten lines, read from its log.

Every process that an error passes through logs this error. So the lines of each process are read separately, without
the prefixes before them. An *error* is the end of a traceback of any class, the words with which a system ends a
process, or, if there is neither, a line that a logger calls an error. The report begins with the cause: our own error
if there is one, otherwise the first error in time that is no echo of another error.
"""

import re
import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

from verl_precision.base.files import table_of

LINES = 10
_CAUSE_WIDTH, _ECHO_WIDTH, _MESSAGE_LINES = 1200, 200, 10
# Of a huge log, only the end is read; of a line, only the start. After too many lines of others, a traceback is over.
_LOG_BYTES, _LINE_CHARACTERS, _BETWEEN = 2**25, 4000, 20
_TABLE = table_of(__file__, "failure_lines.yaml")
# How lines look: the file explains each look.
_LINE = SimpleNamespace(**{
    name: re.compile("|".join(forms).replace("LEVEL", _TABLE["level"]).replace("DATE", _TABLE["date"]))
    for name, forms in _TABLE["looks"].items()
})  # fmt: skip
_WORDS = table_of(__file__, "failure_words.yaml")
_DIED, _LOGS, _ECHO = (re.compile("|".join(_WORDS[kind].values())) for kind in ("died", "logged", "echo"))
_REMEDIES = table_of(__file__, "failure_remedies.yaml")
_OUR_OWN, _PRIMARY, _LOGGED, _SECONDARY = range(4)


@dataclass
class _Error:
    """The report of a process about an error."""

    said: list[str]  # the lines of its message
    names: str  # of the process
    rank: int
    frames: list[str]  # of its traceback, the innermost last
    logger: str  # the logger's prefix of its lines, without the time

    @property
    def text(self) -> str:
        """Return the message on one line, with the error's place if the message has no words."""
        bare = self.frames and " " not in _message(self.said[0])
        return " | ".join([*self.said, f"at {self.frames[-1]}"] if bare else self.said)[:_CAUSE_WIDTH]


@dataclass
class _Process:
    """The state of the reading of one process's lines."""

    names: str
    frames: deque[str] | None = None  # of the traceback that is being read
    between: int = 0  # lines of another thread within the traceback
    ignored: bool = False  # whether the traceback is of an error that Python ignores
    error: _Error | None = None  # whose message is being read


def reason(log: Path, returncode: int) -> str:
    """Return why a process failed, as indented lines, from its log and its exit code (below zero: minus the signal)."""
    ending = [f"ended by {signal.Signals(-returncode).name}"] if returncode < 0 else []
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = (part for line in stream for part in line.decode(errors="replace").splitlines())
        return "\n".join(f"  {line}" for line in relevant_lines(chain(lines, ending)))


def relevant_lines(lines: Iterable[str]) -> list[str]:
    """Return why a run failed: the cause, a known remedy, later errors; for a log without errors, its last lines."""
    log, end = _Log(), deque[str](maxlen=LINES)
    for line in lines:
        clean = _LINE.control.sub("", line[:_LINE_CHARACTERS]).rstrip()
        log.read(clean)
        if clean and "Warning" not in clean:
            end.append(clean[:_CAUSE_WIDTH])
    errors = list(log.errors.values())
    if not errors:
        return list(end)
    cause = min(errors, key=lambda error: error.rank)  # of equal ranks the first
    report = [cause.text + (f" (in {cause.names})" if cause.names else "")]
    report += [f"remedy: {remedy}" for pattern, remedy in _REMEDIES.items() if re.search(pattern, cause.text)][:1]
    # Later errors of other processes, unless they only repeat the cause.
    said, wanted = _message(cause.said[0]), {_OUR_OWN, _PRIMARY, _SECONDARY, cause.rank}
    others = [error.text for error in errors if error is not cause and error.rank in wanted]
    followed = [text for text in others if _message(text) not in cause.text and (said not in text or len(said) < 4)]
    return report + [f"then: {text[:_ECHO_WIDTH]}" for text in followed[-(LINES - len(report)) :]]


class _Log:
    """The errors of a log, in order of time, each once, by their first lines; lines are read one at a time."""

    def __init__(self) -> None:
        self.errors: dict[str, _Error] = {}
        self._processes: dict[str, _Process] = {}
        self._logged = 0  # errors of loggers

    def read(self, line: str) -> None:
        """Read a line: the start, a frame or the end of a process's traceback, more of a message, or another line."""
        words, who, names, logger, level = _LINE.repeated.sub("", line), "", list[str](), "", ""
        while match := _LINE.speaker.match(words) or _LINE.logger.match(words):
            if match.re is _LINE.speaker:
                who += match[0]
                names += [match["name"]] if match["name"] else []
            else:
                logger += re.sub(r"\d+", "0", match[0])
                level = match[match.lastgroup][0] if match.lastgroup else level
            words = words[match.end() :]
        process = self._processes.setdefault(who, _Process(", ".join(names)))
        while match := _LINE.group.match(words):
            words = words[match.end() :]
        if _LINE.traceback.search(words):
            process.frames, process.error, process.between = deque(maxlen=LINES), None, 0
        elif process.frames is not None and words.startswith((" ", "│")):
            if frame := _LINE.frame.match(words):
                process.frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
            elif process.frames and ": " not in process.frames[-1] and not _LINE.raising.match(words):
                process.frames[-1] += f": {words.strip()}"
        else:
            self._read_words(process, words, logger, level)

    def _read_words(self, process: _Process, words: str, logger: str, level: str) -> None:
        """Read a line that is no frame of a traceback."""
        unframed = _LINE.exception.match(words) or _LINE.ours.match(words)
        raised = unframed or (process.frames is not None and _LINE.named.match(words))
        died = (match := _DIED.search(words)) and (match.start() == 0 or not words.startswith("  "))
        error, echo, bad = process.error, _ECHO.search(words), bool(level) and level in "EFC"
        own = raised or (died and not echo and words[:1] not in (" ", "\t"))
        if not own and error is not None and _goes_on(error, words, logger):
            error.said.append(words.strip())
        elif raised or died:
            handled = bool(level) and not bad
            rank = _LOGGED if handled else _OUR_OWN if _LINE.ours.match(words) else _PRIMARY
            rank = _SECONDARY if echo or process.ignored or (raised and handled) else rank
            self._add(process, _LINE.assertion.sub(r"\1: \2", words), rank, logger)
            process.frames, process.ignored = None, False
        elif bad or _LOGS.search(words):
            alike = re.sub(r"\d+", "0", words)
            if self._logged < LINES and alike not in self.errors:
                self._logged += 1
                self._add(process, words, _LOGGED, logger, alike)
        else:
            process.error, process.ignored = None, words.startswith(("Exception ignored in", "--- Logging error"))
            process.between += bool(words)
            if process.between > _BETWEEN:
                process.frames = None

    def _add(self, process: _Process, words: str, rank: int, logger: str, key: str = "") -> None:
        """Begin an error of a process, unless an error with the same first line is known."""
        error = _Error([words], process.names, rank, list(process.frames or ()), logger)
        process.error = error if self.errors.setdefault(key or words, error) is error else None


def _goes_on(error: _Error, words: str, logger: str) -> bool:
    """Return whether a line continues a message: indented or after a traceback, and no line of a progress bar."""
    more = words.startswith((" ", "\t")) or (bool(error.frames) and "%|" not in words)
    more = more and logger == error.logger and error.rank != _LOGGED
    return more and bool(words.strip()) and len(error.said) < _MESSAGE_LINES


def _message(text: str) -> str:
    """Return an exception's message without its class: the part that other processes repeat."""
    return _LINE.named.sub("", text) or text
