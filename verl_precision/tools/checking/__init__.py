"""The verb `check` for a run, a checkpoint, an installation or a cluster; the rules belong to the plugin.

composing, words        what was typed, the config that it composes, and the words that keep it from that
recipe_config           every fault of a run; what runs in which dtype, what is trained, and who decides it
checkpoint              does a model fit FP16? its weights, its activations and gradients
installation            is the plugin loaded, here and on every node of a Ray cluster?
verbs                   the verb `check`, and what a terminal shows of it
"""
