"""This package's engines under verl.

fsdp_engine      FSDP's mixin: which phase comes when, and the engines that are registered
megatron_engine  Megatron's mixin: overflows that cost an update and not the run
registry         both, in verl's registry
arithmetic       a model's operations, rounded once
engine_config    verl's engine config with our settings
model_outputs    FP32 log-probs and entropy
measurement      the mismatch, measured while the worker updates, in any engine of verl
learning_rate    scaled in each update by the effective sample size
router_replay    the rollout's choice of experts, replayed
weight_export    weights on their way to the rollout and into an export
policy_losses    the losses under verl's call
rollout_weights  equations (9) and (10) in verl's rollout correction
single_rank      an engine outside of a training run
"""
