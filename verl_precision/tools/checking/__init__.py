"""check: what a person asks about a run, a checkpoint, an installation or a cluster; the rules are the plugin's.

A recipe or a command, for `verl-precision check CONFIG`:

    command             what was typed, as recipe and overrides; which main it starts, with which config
    composing           composes it as verl does; our words for what does not compose
    words               keys that verl does not have, or that nothing reads: renamed, gone, misspelt, added
    recipe_config       every fault, and the tables
    dtype_table         the dtype of each part, and what decides it
    training_table      what is trained, and who decides it
    way_out             the command without the words that win over presets

A model, an installation, a cluster:

    checkpoint          do the weights survive FP16? tensor by tensor, in slices
    activations         do activations and gradients? forward and backward, layer by layer
    installation        is the plugin loaded, what is registered, which versions
    cluster             is every node of a Ray cluster ready for a run?

    show                the tables that a terminal gets of all of these
    verbs               the verb `check`
"""
