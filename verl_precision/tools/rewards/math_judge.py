r"""The process behind `math_answers`: in its main thread, SymPy may be ended by a signal.

One JSON array a line comes in, `[answer, truth, as_published]`; one line goes out, `1` or `0`. The first line, `ready`,
says that everything is loaded. An answer that cannot be read is equal to nothing.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
import warnings

SECONDS = 3  # for one answer to be read as published, and for two to be compared, 9 in all; the authors allow 1
MEMORY = 4 << 30  # bytes of address space, of which SymPy needs a tenth: a power tower ends here, not the host


class TooLongError(BaseException):
    """A comparison took more than `SECONDS`; no handler of errors within SymPy holds it."""


def in_math(text: str) -> str:
    """Return an answer as LaTeX, without what math-verify stumbles over: currency, size of a bracket, full stop."""
    text = re.sub(r"\\\$|\\[bB]igg?[lrm]?(?![A-Za-z])|(?<!\.)\.\s*$", "", text)
    return text if "$" in text else f"${text}$"


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing but replies goes to the one who asks
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # math-verify logs, with a traceback, each answer that it cannot read
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    from verl_precision.tools.rewards.answer_equality import same_as_published, same_by_mathematics

    def as_published(answer: str, truth: str) -> bool:
        forms = (LatexExtractionConfig(), ExprExtractionConfig())
        read = [parse(in_math(text), forms, parsing_timeout=SECONDS) for text in (truth, answer)]
        return bool(verify(*read, timeout_seconds=SECONDS)) or same_as_published(answer, truth)

    def too_long(*_: object) -> None:
        raise TooLongError

    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    print("ready", file=replies)
    for line in sys.stdin:
        *pair, published = json.loads(line)
        signal.signal(signal.SIGALRM, too_long)  # math-verify has its own
        signal.alarm(0 if published else SECONDS)
        try:
            same = as_published(*pair) if published else same_by_mathematics(*pair)
        except (TooLongError, Exception):  # of any kind: SymPy fails in many ways on what is no mathematics
            same = False
        signal.alarm(0)
        print(int(same), file=replies)


if __name__ == "__main__":
    main()
