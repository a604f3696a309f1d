"""`verl-precision <verb>`: what a user types. Each module has some verbs and their options; the work is in `tools/`.

What a verb needs is imported inside its function, so that `--help` and a refused option take a fraction of a second.
"""

from verl_precision.cli import check, compare, measure, write  # verbs in the order of --help
from verl_precision.cli.verb import app

__all__ = ["app", "check", "compare", "measure", "write"]
