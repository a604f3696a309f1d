"""FP16 training inside verl's FSDP engines (torch only; `integration/` connects it to verl).

settings        settings of engine, loss scale and shadow, with bounds
loss_scaling    torch's sharded gradient scaler with settings, bounds, diagnosis, metrics of its steps and exact state
log_probs       FP32 log-probs and entropy from 16-bit logits, in chunks, over the tokens that sampling kept
forward_dtypes  verifies the dtypes of a forward pass; an output head in FP32
shadow          a second copy of the actor's weights, in the rollout's dtype; a forward with rounded weights
router_replay   a mixture of experts computes with the experts that another engine chose
arithmetic_choice  the arithmetic of a process, and which models support it
"""
