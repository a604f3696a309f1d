"""`verl-precision <verb>`: what a user types. Each verb is an entry point, and stands in the room that does its work.

What a verb needs is imported inside its function, so that `--help` and a refused option take a fraction of a second.
"""

from verl_precision.cli.verb import app

__all__ = ["app"]
