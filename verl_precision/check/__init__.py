"""`verl-precision check`: what will run in which dtype, what is wrong, and what to do.

    installation.py     is the plugin loaded, what is registered, which versions
    recipe.py           compose a recipe as verl would; the table of its dtypes; what every rule says of it
    environment.py      look at this machine, and ask verl and vLLM's kernels: what rules have to know
    checkpoint.py       do a checkpoint's weights survive FP16? tensor by tensor, in slices
    activations.py      do activations and gradients? forward and backward, layer by layer
    cluster.py          is every node of a Ray cluster ready for a run?
    memory.py           what a run needs of each GPU, by arithmetic
    cpu_kernels.py      what vLLM runs on this CPU: its library, head sizes, the path of a linear layer
    quiet.py            hide other packages' notes and warnings
    show.py             the tables a terminal gets

The rules are in `rules/`.
"""

from verl_precision.check.installation import Finding, findings, versions

__all__ = ["Finding", "findings", "versions"]
