"""`python -m verl_precision.cli <verb>`: for a shell whose PATH lacks `verl-precision`."""

from verl_precision.cli import app

app()
