"""The operations of a transformer, rounded once: trainer and rollout then round the same real numbers.

An operation computes inside in more bits than its result has, and rounds once. In FP64 the order of its sums no longer
shows in the result, whatever kernel, batch or split computed it.
"""
