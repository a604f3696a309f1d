r"""Decides whether two answers to a problem of mathematics are the same, as \frac{1}{2}, \dfrac12, 1/2 and 0.5 are.

By default, mathematics decides: both answers are read completely (`answer_forms`) and compared (`answer_equality`).
With `as_published`, an answer counts if one of the three rules of the paper's authors accepts it: verl's for MATH,
math-verify's comparison of expressions, or a comparison of words and of numbers with units. The rules accept some wrong
answers and refuse some right ones (https://github.com/sail-sg/oat, oat/utils/math_grader.py).

SymPy can take hours. A signal cannot stop it: verl calls rewards outside the main thread, and a power tower runs in C.
So SymPy runs in a separate process, which runs this module and is ended and replaced after a time limit.
"""

import atexit
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import warnings
from importlib.util import find_spec

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.base.loggers import general as logger
from verl_precision.tools.rewards.answer_text import plain_number

INSTALL = 'pip install "math-verify[antlr4_9_3]"'
SECONDS = 10.0  # for one pair; the limits within the process act first if they can
SECONDS_WITHIN = 3  # to read one answer as published, and to compare two; 9 in all. The authors allow 1
MEMORY = 4 << 30  # bytes of address space. SymPy needs a tenth; a power tower ends the process, not the host
_START_SECONDS = 120.0  # for the process to load SymPy, on a machine that is busy


def braced_box(text: str) -> str | None:
    r"""Return the content of a text's last \boxed{...}, braces balanced; None if this box is missing or incomplete."""
    start = text.rfind("\\boxed{")
    depth = 0
    for position in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def same_answer(answer: str, truth: str, as_published: bool = False) -> bool:
    """Return whether an answer equals the ground truth in any form; raise an error if math-verify does not load.

    With `as_published`, return the verdict of the authors' three rules, right or wrong.
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
    """A process that compares one pair at a time, for any thread of this process; it starts with the first pair."""

    def __init__(self) -> None:
        self.seconds = SECONDS
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.end)

    def _forget(self) -> None:
        """Drop the process: a forked child that used its parent's would take the parent's replies."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def says_equal(self, answer: str, truth: str, as_published: bool = False) -> bool:
        """Return the verdict of the process; a pair that takes too long is not equal."""
        with self._lock:
            process = self._process = self._process or _started()
            reply = b""
            try:
                process.stdin.write(json.dumps([answer, truth, as_published]).encode() + b"\n")  # type: ignore[union-attr]
                reply = _line(process, self.seconds)
            except BrokenPipeError:  # the process has ended, e.g. because memory ran out
                pass
            finally:  # a late reply would be taken for the next pair's
                if not reply:
                    self.end()
        if not reply:
            logger.warning("the judge could not compare %.200r with %.200r; they count as different", answer, truth)
        return reply == b"1\n"

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started() -> "subprocess.Popen[bytes]":
    require_math_verify()
    command = [sys.executable, "-m", __name__]
    # Without buffers: a fork would copy the content of a buffer, which would then be written twice.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    if _line(process, _START_SECONDS) != b"ready\n":
        process.kill()
        raise EnvironmentMismatchError("math-verify cannot be imported; its error is above", remedy=INSTALL)
    return process


def _line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """Return the next line, or nothing if no line comes in time."""
    assert process.stdout is not None
    return process.stdout.readline() if select.select([process.stdout], [], [], seconds)[0] else b""


class _TooLongError(BaseException):
    """A comparison took too long; error handlers within SymPy do not catch this class."""


def _judge() -> None:
    """Run in the process: read a JSON array [answer, truth, as_published] from each line, and reply with 1 or 0."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output must not mix with replies
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # math-verify logs, with a traceback, each answer that it cannot read
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    from verl_precision.tools.rewards.answer_equality import same_as_published, same_by_mathematics

    def in_math(text: str) -> str:
        """Return LaTeX without parts that math-verify misreads: currency signs, bracket sizes, full stop."""
        text = re.sub(r"\\\$|\\[bB]igg?[lrm]?(?![A-Za-z])|(?<!\.)\.\s*$", "", text)
        return text if "$" in text else f"${text}$"

    def as_published(answer: str, truth: str) -> bool:
        forms = (LatexExtractionConfig(), ExprExtractionConfig())
        read = [parse(in_math(text), forms, parsing_timeout=SECONDS_WITHIN) for text in (truth, answer)]
        return bool(verify(*read, timeout_seconds=SECONDS_WITHIN)) or same_as_published(answer, truth)

    def too_long(*_: object) -> None:
        raise _TooLongError

    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    print("ready", file=replies)
    for line in sys.stdin:
        answer, truth, published = json.loads(line)
        signal.signal(signal.SIGALRM, too_long)  # math-verify sets another handler
        signal.alarm(0 if published else SECONDS_WITHIN)
        try:
            same = as_published(answer, truth) if published else same_by_mathematics(answer, truth)
        except (_TooLongError, Exception):  # any error: SymPy fails in many ways on text that is no mathematics
            same = False
        signal.alarm(0)
        print(int(same), file=replies)


_JUDGE = _Judge()
if __name__ == "__main__":
    _judge()
