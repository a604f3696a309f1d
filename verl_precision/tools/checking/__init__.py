"""check: what a person asks about a run, a checkpoint, an installation or a cluster; the rules are the plugin's.

command, composing, words       what was typed, the config that it composes, and the words that keep it from that
recipe_config                   every fault of a run, with its tables
dtype_table, training_table     what runs in which dtype, what is trained, and who decides it
way_out                         the command without the words that win over presets
checkpoint, activations         does a model fit FP16? tensor by tensor; forward and backward, layer by layer
installation, cluster           is the plugin loaded, here and on every node of a Ray cluster?
show, verbs                     the tables that a terminal gets, and the verb `check`
"""
