"""`verl-precision check`: what will run in which dtype, what is wrong, and what to do.

    installation.py     is the plugin loaded, what is registered, which versions
    checkpoint.py       do a checkpoint's weights survive FP16? tensor by tensor, in slices
    activations.py      do activations and gradients? forward and backward, layer by layer
    cluster.py          is every node of a Ray cluster ready for a run?
    memory.py           what a run needs of each GPU, by arithmetic
    show.py             the tables a terminal gets

The rules are in `rules/`; a recipe is composed, and this machine looked at, in `integration/`.
"""

from verl_precision.check.installation import Finding, findings, versions

__all__ = ["Finding", "findings", "versions"]
