"""FP16 that is really FP16, inside verl's FSDP engines (torch alone; `integration/` fits it to verl).

settings        settings of engine, loss scale and shadow, with bounds
loss_scaling    torch's sharded gradient scaler with settings, bounds, diagnosis, metrics of its steps and exact state
log_probs       FP32 log-probs and entropy from 16-bit logits, by chunks, over the tokens that sampling kept
forward_dtypes  which dtype a forward really computed in; an output head in FP32
shadow          the actor's weights a second time, in the rollout's dtype; a forward with rounded weights
router_replay   a mixture of experts computes with the experts that another engine chose
arithmetic_choice  which arithmetic a process was asked for, and what a model must be to have it
"""
