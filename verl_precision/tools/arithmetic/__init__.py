"""The operations of a transformer, rounded once: trainer and rollout then round the same real numbers.

An operation computes inside in more bits than its result has, and rounds once. In FP64 the order of its sums no longer
shows in the result, whatever kernel, batch or split computed it.

operations           linear, RMS norm, rotary embedding, SwiGLU, router, experts
attention            causal attention over spans of queries and keys: packed sequences, or pages of a cache
trainer_model        the trainer's model: a step of an engine's build
vllm_operations      vLLM's on a CPU; vllm_experts: of a mixture of experts, where the experts also choose
stochastic_rounding  of the weights that are sent: a step of an engine's build
"""
