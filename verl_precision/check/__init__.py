"""`verl-precision check`: what will run in which dtype, what is wrong, and what to do.

    installation        is the plugin loaded, what is registered, which versions
    checkpoint          do a checkpoint's weights survive FP16? tensor by tensor, in slices
    activations         do activations and gradients? forward and backward, layer by layer
    cluster             is every node of a Ray cluster ready for a run?
    show                the tables a terminal gets

The rules are in `rules/`; a recipe is composed, and this machine looked at, in `integration/`.
"""
