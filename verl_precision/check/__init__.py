"""`verl-precision check`: what will run in which dtype, what is wrong, and what to do.

    installation.py     is the plugin loaded, what is registered, which versions
    fault.py            what a finding says: setting, value, allowed, remedy
    dtypes.py           the dtypes a composed config asks for: the table
    dtype_traps.py      settings that are ignored, contradict each other, or lose precision
    loss_traps.py       aggregation, bypass mode, thresholds
    rollout_traps.py    log-probs, truncated sampling, vLLM
    recipe.py           compose a recipe as verl would, and ask every trap
    checkpoint.py       do a checkpoint's weights survive FP16? tensor by tensor, in slices
    activations.py      do activations and gradients? forward and backward, layer by layer
    cluster.py          is every node of a Ray cluster ready for a run?
    memory.py           what a run needs of each GPU, by arithmetic
    cpu_kernels.py      what vLLM runs on this CPU: its library, head sizes, the path of a linear layer
    quiet.py            hide other packages' notes and warnings
    show.py             the tables a terminal gets

The traps are pure functions of a composed config and an `Environment`.
"""

from verl_precision.check.installation import Finding, findings, versions

__all__ = ["Finding", "findings", "versions"]
