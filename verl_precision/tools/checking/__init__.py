"""The verb `check` for a run, a checkpoint, an installation or a cluster; the rules belong to the plugin.

composing, words        the config that a command composes, and the words of a command that are refused
recipe_config           every fault of a run; its dtypes, its training, and the setting that decides each
checkpoint              whether a model's weights fit FP16
installation            whether the plugin is loaded, here and on every node of a Ray cluster
verbs                   the verb `check`, and its output on a terminal
"""
