"""Why a run failed, in at most ten lines, read from its log.

One error is logged by every process it passes through. Here a log is read as a list of *headlines*, the last lines of
tracebacks and the words with which a system ends a process, each said once. The cause comes first: our own error if
there is one, else the first in time that is no echo of another.
"""

import re
import signal
from collections.abc import Iterable
from pathlib import Path

from verl_precision.base.files import table_of

LINES = 10
_CAUSE_WIDTH, _ECHO_WIDTH = 1200, 200

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Who speaks: Ray's "(WorkerDict pid=1, ip=192.0.2.1) ", vLLM's "(EngineCore pid=2) "; then the logger's own words.
_SPEAKER = re.compile(r"^\((?:(?:(?P<name>\S+) )?pid=\d+|raylet)(?:, ip=[\w.:]+)?\) ?")
_LOGGER = re.compile(r"^(?:[A-Z]+ [\d-]+ [\d:]+ \[\S+\] |[A-Z]+:[\d-]+ [\d:,]+:)")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")

# The last line of a traceback. A source line is indented; a warning begins with a path: neither matches. Ray's
# "RayTaskError: ray::Worker.method() (pid=1, ...)" only says whom an error passed through.
_EXCEPTION = re.compile(
    r"^(?!.*RayTaskError: \S*ray::)(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Fault)(?::\s+|$)"
)
_OURS = re.compile(r"^verl_precision(?:: |\.(?:base\.)?errors\.)")
# How a system ends a process, in the words of the shell, Ray, vLLM, torch and Python.
_DEATH = re.compile(
    r"SIGBUS|SIGSEGV|SIGILL|SIGKILL|SIGABRT|Bus error|Segmentation fault|Illegal instruction|Killed$|died unexpectedly|"
    r"OutOfMemory|Out of memory|low on memory|memory pressure|No space left on device|Fatal Python error"
)
# Secondary errors from other processes; never chosen as the cause if any primary error was logged.
_ECHO = re.compile(
    r"RayTaskError|EngineDeadError|ActorDiedError|CancelledError|KeyboardInterrupt|SystemExit|"
    r"Call to \w+ method failed|Worker failed with error|no materializable trajectories|Engine core \w+ failed"
)

_REMEDIES = table_of(__file__, "failure_remedies.yaml")


def reason(log: Path, returncode: int) -> str:
    """Return why a process failed, as indented lines, from its log and its exit code (below zero: minus the signal)."""
    lines = log.read_text(errors="replace").splitlines()
    if returncode < 0:
        lines.append(f"ended by {signal.Signals(-returncode).name}")
    return "\n".join(f"  {line}" for line in relevant_lines(lines))


def relevant_lines(lines: Iterable[str]) -> list[str]:
    """Return why a run failed: the cause, its remedy where one is known, and what followed, each once.

    These are at most `LINES` lines; the end of the log where no line of it looks like an error.
    """
    clean = [_ANSI.sub("", line).rstrip() for line in lines]
    headlines = _headlines(clean)
    if not headlines:
        return [line for line in clean if line and "Warning" not in line][-LINES:]
    cause = min(headlines, key=lambda line: 0 if _OURS.match(line) else 2 if _ECHO.search(line) else 1)  # the first
    report = [cause[:_CAUSE_WIDTH] + (f" (in {headlines[cause]})" if headlines[cause] else "")]
    report += [f"remedy: {remedy}" for pattern, remedy in _REMEDIES.items() if re.search(pattern, cause)][:1]
    said = _message(cause)
    # What the processes said that heard of the cause, when it is more than a repetition of it.
    followed = [line for line in headlines if line != cause and said not in line and _message(line) not in cause]
    return report + [f"then: {line[:_ECHO_WIDTH]}" for line in followed[-(LINES - len(report)) :]]


def _headlines(lines: Iterable[str]) -> dict[str, str]:
    """Return the lines that name an error or a process's end, in time's order, and for each who said it first."""
    found: dict[str, str] = {}
    for line in lines:
        words, speakers = _REPEATED.sub("", line), []
        while match := _SPEAKER.match(words) or _LOGGER.match(words):
            speakers.append(match.groupdict().get("name"))
            words = words[match.end() :]
        if _EXCEPTION.match(words) or _OURS.match(words) or (_DEATH.search(words) and not words.startswith("  ")):
            found.setdefault(words, ", ".join(name for name in speakers if name))
    return found


def _message(headline: str) -> str:
    """Return an exception's own words, without its class: what others repeat."""
    return _EXCEPTION.sub("", headline) or headline
