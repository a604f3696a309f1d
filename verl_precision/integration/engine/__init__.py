"""This package's engines under verl.

build            an engine's build: one list of steps; what takes part in updates and weight streams
fsdp_engine      FSDP's mixins: which phase comes when, and the engines that are registered
megatron_engine  Megatron's mixin: overflows that cost an update and not the run
registry         both in verl's registry, by config verl's own or ours
engine_config    verl's engine config with our settings
model_outputs    FP32 log-probs and entropy
measurement      the mismatch, measured while the worker updates, in any engine of verl
router_replay    the rollout's choice of experts, replayed
weight_export    weights on their way to the rollout and into an export; adapters: LoRA merged in FP32
policy_losses    the losses under verl's call
rollout_weights  equations (9) and (10) in verl's rollout correction
"""
