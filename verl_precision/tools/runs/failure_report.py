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

from verl_precision.base.files import table_of

LINES = 10
_CAUSE_WIDTH, _ECHO_WIDTH, _MESSAGE_LINES = 1200, 200, 10
# Of a huge log, only the end is read; of a line, only the start. After too many lines of others, a traceback is over.
_LOG_BYTES, _LINE_CHARACTERS, _BETWEEN = 2**25, 4000, 20
# Control characters, and a progress bar before another process's text.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]|^[^|]*\d+%\|[^\[]*\[[^]]*\](?=\S)")
_LEVEL = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|[DIWEFC]"
# The process of a line: Ray's "(WorkerDict pid=1, ip=192.0.2.1) ", vLLM's "(EngineCore pid=2) ", torch's "[rank3]: ".
_SPEAKER = re.compile(r"^(?:\((?:(?:(?P<name>\S+) )?pid=\d+|raylet)(?:, ip=[\w.:]+)?\)|\[(?:rank|default)\d+\]:) ?")
# Then the logger's prefix: of vLLM; of verl and uvicorn; of Python, Hydra and Ray; of C++.
_DATE = r"\[?\d{4}-\d\d-\d\d[ T][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?"
_LOGGER = re.compile(
    rf"^(?:(?P<vllm>{_LEVEL}) [\d-]+ [\d:]+ \[\S+\] |(?P<verl>{_LEVEL}):(?:[\d-]+ [\d:,]+:| +|[\w.]+:)|"
    rf"{_DATE}(?:[^\w(]+[\w.]+)??[^\w(]+(?P<dated>{_LEVEL})\b[\d\s\]]*(?:\(\w+\) )?(?:[\w/.]+\.\w+:\d+:? )?"
    rf"(?:-- |- (?:[\w.]+ - )?)?|\[?(?P<cpp>{_LEVEL})(?:\d{{3,4}} [\d:.]+)?(?: +\d+)? [\w./-]+:\d+\] |{_DATE}\]? )"
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_GROUP = re.compile(r"^ *(?:\| ?|\+ (?=Exception Group)|\+[-+]+(?: \d+ -+)?$)")  # the frame of an exception group
_TRACEBACK = re.compile(r"(?:Exception Group )?Traceback \(most recent call last\)(?::$| ─)|ray::\S+\(\) \(pid=")
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+), in (.+)')
_RAISE = re.compile(r"^\s+(?:raise\b|[~^]+$)")  # a source line that adds nothing to the error

# The end of a traceback: the name of a class, with dots or a capital letter.
_CLASS = re.compile(rf"^(?!(?:{_LEVEL})\b)(?:(?:(?:[A-Za-z_]\w*|<locals>)\.)+\w+|[A-Z]\w*)(?::\s+|:?$)")
# The same on a line whose traceback is not in the log. A source line is indented, a warning begins with a path.
_EXCEPTION = re.compile(
    r"^(?!Error\b)(?:[A-Za-z_]\w*\.)*(?=[A-Z])\w*(?:Error|Exception|Exit|Interrupt|Fault|Group)(?::\s+|$)"
)
_OURS = re.compile(r"^verl_precision(?:: |\.(?:base\.)?errors\.)")
_ASSERTION = re.compile(r"^(\S+?:\d+).*?(Assertion .* failed)")  # every CUDA thread prints it
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
        clean = _CONTROL.sub("", line[:_LINE_CHARACTERS]).rstrip()
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
        words, who, names, logger, level = _REPEATED.sub("", line), "", list[str](), "", ""
        while match := _SPEAKER.match(words) or _LOGGER.match(words):
            if match.re is _SPEAKER:
                who += match[0]
                names += [match["name"]] if match["name"] else []
            else:
                logger += re.sub(r"\d+", "0", match[0])
                level = match[match.lastgroup][0] if match.lastgroup else level
            words = words[match.end() :]
        process = self._processes.setdefault(who, _Process(", ".join(names)))
        while match := _GROUP.match(words):
            words = words[match.end() :]
        if _TRACEBACK.search(words):
            process.frames, process.error, process.between = deque(maxlen=LINES), None, 0
        elif process.frames is not None and words.startswith((" ", "│")):
            if frame := _FRAME.match(words):
                process.frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
            elif process.frames and ": " not in process.frames[-1] and not _RAISE.match(words):
                process.frames[-1] += f": {words.strip()}"
        else:
            self._read_words(process, words, logger, level)

    def _read_words(self, process: _Process, words: str, logger: str, level: str) -> None:
        """Read a line that is no frame of a traceback."""
        raised = (process.frames is not None and _CLASS.match(words)) or _EXCEPTION.match(words) or _OURS.match(words)
        died = (match := _DIED.search(words)) and (match.start() == 0 or not words.startswith("  "))
        error, echo, bad = process.error, _ECHO.search(words), bool(level) and level in "EFC"
        own = raised or (died and not echo and words[:1] not in (" ", "\t"))
        if not own and error is not None and _goes_on(error, words, logger):
            error.said.append(words.strip())
        elif raised or died:
            handled = bool(level) and not bad
            rank = _LOGGED if handled else _OUR_OWN if _OURS.match(words) else _PRIMARY
            rank = _SECONDARY if echo or process.ignored or (raised and handled) else rank
            self._add(process, _ASSERTION.sub(r"\1: \2", words), rank, logger)
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
    return _CLASS.sub("", text) or text
