r"""The process behind `math_answers`: it asks math-verify whether answers are equal, in its main thread.

One JSON array a line comes in, `[answer, truth]`; one line goes out, `1` or `0`. The first line, `ready`, says that
math-verify is loaded. An answer that math-verify cannot read is equal to nothing.
"""

import json
import logging
import os
import re
import resource
import sys
import warnings

SECONDS = 3  # for one answer to be read, and for two to be compared, 9 in all; the authors allow 1
MEMORY = 4 << 30  # bytes of address space, of which SymPy needs a tenth: a power tower ends here, not the host


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

    forms = (LatexExtractionConfig(), ExprExtractionConfig())
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    print("ready", file=replies)
    for line in sys.stdin:
        answer, truth = (parse(in_math(text), forms, parsing_timeout=SECONDS) for text in json.loads(line))
        print(int(verify(truth, answer, timeout_seconds=SECONDS)), file=replies)


if __name__ == "__main__":
    main()
