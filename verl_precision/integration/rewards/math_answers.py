r"""Are two answers to a problem of mathematics the same? \frac{1}{2}, \dfrac12, 1/2 and 0.5 are.

The paper's authors accept an answer if one of three rules does (https://github.com/sail-sg/oat,
oat/utils/math_grader.py), and so does this: verl's own for MATH, a comparison of normalised text (`answer_text`), and
math-verify's, which compares expressions.

math-verify ends what takes too long with a signal, which works in a process's main thread alone; anywhere else it finds
nothing equal. verl calls rewards in other threads. So math-verify has a process of its own here, `math_judge`, which is
ended and replaced when it does not answer in time: a power tower runs in C, where a signal is not looked at.
"""

import atexit
import json
import logging
import select
import subprocess
import sys
import threading
from importlib.util import find_spec

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.integration.rewards.answer_text import same_text

INSTALL = 'pip install "math-verify[antlr4_9_3]"'
SECONDS = 10.0  # for one pair; math-verify's own limits in the process come first where they can
_START_SECONDS = 120.0  # for the process to load SymPy, on a machine that is busy

logger = logging.getLogger("verl_precision")


def braced_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, braces balanced; None if there is none, or a part."""
    start = text.rfind("\\boxed{")
    depth = 0
    for position in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def same_answer(answer: str, truth: str) -> bool:
    """Return whether an answer is the ground truth, in whatever form; an error if math-verify does not load."""
    from verl.utils.reward_score.math_reward import is_equiv

    answer, truth = answer.strip(), truth.strip()
    return bool(answer) and (is_equiv(answer, truth) or same_text(answer, truth) or _JUDGE.says_equal(answer, truth))


def require_math_verify() -> None:
    """Raise an error that says what to do if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise EnvironmentMismatchError("math-verify, which compares answers, is not installed", remedy=INSTALL)


class _Judge:
    """A process that is asked one pair at a time, by any thread; it starts with the first pair."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def says_equal(self, answer: str, truth: str) -> bool:
        """Return what math-verify says; what takes too long is not equal."""
        with self._lock:
            if self._process is None:
                self._process = self._started()
            reply = self._ask(self._process, json.dumps([answer, truth]))
            if reply is None:
                logger.warning("math-verify did not compare %.200r with %.200r; they count as different", answer, truth)
                self._end()
        return reply == "1"

    def _started(self) -> "subprocess.Popen[str]":
        require_math_verify()
        command = [sys.executable, "-m", "verl_precision.integration.rewards.math_judge"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if _line(process, _START_SECONDS) != "ready":
            process.kill()
            raise EnvironmentMismatchError("math-verify does not load; its own error is above", remedy=INSTALL)
        atexit.register(process.kill)
        return process

    def _ask(self, process: "subprocess.Popen[str]", question: str) -> str | None:
        try:
            print(question, file=process.stdin, flush=True)
        except BrokenPipeError:  # it has ended, e.g. for want of memory
            return None
        return _line(process, self._seconds)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _line(process: "subprocess.Popen[str]", seconds: float) -> str | None:
    """Return the next line, or None where none comes."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], seconds)[0]:
        return None
    return process.stdout.readline().strip() or None


_JUDGE = _Judge()
