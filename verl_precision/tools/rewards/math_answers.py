r"""Are two answers to a problem of mathematics the same? \frac{1}{2}, \dfrac12, 1/2 and 0.5 are.

By default they are if mathematics says so: all of both is read (`answer_forms`) and compared (`answer_equality`). The
paper's authors accept an answer if one of three rules does (https://github.com/sail-sg/oat, oat/utils/math_grader.py),
and so does this with `as_published`: verl's own for MATH, math-verify's, which compares expressions, and a comparison
of numbers with units and of words. They accept some wrong answers, and refuse some right ones.

SymPy can take hours, and what takes too long is ended with a signal, which works in a process's main thread alone; verl
calls rewards in other threads. So SymPy has a process of its own here, `math_judge`, which is ended and replaced when
it does not answer in time: a power tower runs in C, where a signal is not looked at.
"""

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
from importlib.util import find_spec

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.tools.rewards.answer_text import plain_number

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


def same_answer(answer: str, truth: str, as_published: bool = False) -> bool:
    """Return whether an answer is the ground truth, in whatever form; an error if math-verify does not load.

    With `as_published`, what the authors' three rules say, right or wrong.
    """
    answer, truth = answer.strip(), truth.strip()
    if not answer:
        return False
    if as_published:
        from verl.utils.reward_score.math_reward import is_equiv

        return is_equiv(answer, truth) or _JUDGE.says_equal(answer, truth, as_published)
    number, number_of_truth = plain_number(answer), plain_number(truth)
    if answer == truth or (number is not None and number_of_truth is not None):
        return answer == truth or number == number_of_truth
    return _JUDGE.says_equal(answer, truth)


def require_math_verify() -> None:
    """Raise an error that says what to do if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise EnvironmentMismatchError("math-verify, which compares answers, is not installed", remedy=INSTALL)


class _Judge:
    """A process that is asked one pair at a time, by any thread of this one; it starts with the first pair."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def says_equal(self, answer: str, truth: str, as_published: bool = False) -> bool:
        """Return what it says; what takes too long is not equal."""
        with self._lock:
            if self._process is None:
                self._process = self._started()
            reply = None
            try:
                reply = self._ask(self._process, json.dumps([answer, truth, as_published]))
            finally:  # a reply that nobody has waited for would be the next pair's
                if reply is None:
                    self._end()
        if reply is None:
            logger.warning("the judge did not compare %.200r with %.200r; they count as different", answer, truth)
        return reply == "1"

    def _forget(self) -> None:
        """Leave the process to the one that started it: two that ask would read each other's replies."""
        if self._process is not None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for pipe in filter(None, (self._process.stdin, self._process.stdout)):
                os.dup2(nowhere, pipe.fileno())  # not closed: another file would get the number
            os.close(nowhere)
            self._process.returncode = 0  # it is no child of this process
        self._lock, self._process = threading.Lock(), None

    def _started(self) -> "subprocess.Popen[str]":
        require_math_verify()
        command = [sys.executable, "-m", "verl_precision.tools.rewards.math_judge"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if _line(process, _START_SECONDS) != "ready":
            process.kill()
            raise EnvironmentMismatchError("math-verify does not load; its own error is above", remedy=INSTALL)
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
