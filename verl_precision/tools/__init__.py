"""The verbs of the command line: a package for each, and the packages they share.

verbs       the functions of the verbs; checking, runs and tokens have their own
checking    check: a recipe, a command, a checkpoint, an installation, a cluster
runs        compare, report: whole runs of verl, followed and shown
gap         mismatch, explain: the size of the gap between two engines, and its causes
evaluate    evaluate, sanity-set: how often a model solves each problem of a data set
selftest    selftest: the acceptance test of a machine for FP16 RL
export, data, patching   the verbs export, data (with tiny-model) and patch
operators   a run tells an operator: messages of its alarms, metrics for Prometheus, a dashboard and rules
engines     shared: vLLM samples and verl's engine scores, each in its own process
tiny_model  shared: tiny random models with tokenizer, which `scale=cpu` trains and `tiny-model` writes
jobs        shared: problems, prompts, and the results on disk from which a killed job continues
"""
