"""The operations of a transformer, rounded once: trainer and rollout then round the same real numbers.

An operation computes inside in more bits than its result has, and rounds once. In FP64 the order of its sums no longer
shows in the result, whatever kernel, batch or split computed it. Torch alone; who asks for it is in `integration`.

chosen      which arithmetic this process was asked for, and the families of models that have it
operations  linear, RMS norm, rotary embedding, SwiGLU, router, experts, log-softmax
attention   causal attention over spans of queries and keys: packed sequences, or pages of a cache
"""
