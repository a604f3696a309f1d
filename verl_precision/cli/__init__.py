"""The command line, `verl-precision <verb>`. Each verb is an entry point and lives in the package that does its work.

What a verb needs is imported inside its function, so that `--help` and a refused option take a fraction of a second.
"""

from verl_precision.cli.verb import app

__all__ = ["app"]
