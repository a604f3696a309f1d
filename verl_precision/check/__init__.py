"""What will run in which dtype, what is wrong, and what to do: said before Ray or a model starts.

A recipe, for `verl-precision check CONFIG` and for a run that has a preset:

    command             what was typed, as recipe and overrides; which main it starts, with which config
    composition         our words for what does not compose
    keys                keys that verl does not have, or that nothing reads: renamed, gone, misspelt, added
    recipe_config       composes it as verl does; every fault
    dtype_table         the dtype of each part, and what decides it
    who_decides         who says a setting: verl, a recipe, a preset
    winning_words       words of the command that win over presets; presets=win, with which they do not
    training_table      what is trained, and who decides it
    way_out             the command without those words
    probe               what rules know beyond the config: this machine, verl's answers, vLLM's kernels
    models              what is known of a model without loading it; `served_models`: those beside the policy
    loss_trial          the policy loss in force, tried on a small batch
    unknowns            what could not be found out, for a verdict that says what was not checked
    verl_refusals       what verl's own validators, typed configs and registries refuse
    rules/              what can be wrong with a config: every rule, once
    remedies            remedies that do not ask for what is chosen
    preflight           asks the rules in the driver of a run, and ends it at an error

A model, an installation, a cluster:

    checkpoint          do the weights survive FP16? tensor by tensor, in slices
    activations         do activations and gradients? forward and backward, layer by layer
    installation        is the plugin loaded, what is registered, which versions
    cluster             is every node of a Ray cluster ready for a run?

    show                the tables that a terminal gets of all of these
"""
