"""The verbs of the command line, one package for each with its `verbs.py`, and the packages they share.

checking    check: a recipe, a command, a checkpoint, an installation, a cluster
runs        compare, report: whole runs of verl, followed and shown
gap         mismatch, explain: how far two engines are apart, and why
evaluate    evaluate, sanity-set: how often a model solves the problems of a data set, and which only sometimes
selftest    selftest: the acceptance test of a machine for FP16 RL
export, data, patching   the verbs of their names
engines     shared: vLLM that samples, verl's engine that scores, each in a process of its own
tiny_model  shared: tiny random models with tokenizer, which `scale=cpu` trains and `tiny-model` writes
jobs        shared: problems, prompts, and results on disk that a killed job continues from
"""
