"""The command line, `verl-precision <verb>`. Each verb is an entry point, in the package that does its work.

The imports of a verb are inside its function, so that `--help` and a refused option take a fraction of a second.
"""

from verl_precision.cli.verb import app

__all__ = ["app"]
