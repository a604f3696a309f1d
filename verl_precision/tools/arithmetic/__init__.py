"""The operations of a transformer, rounded once: trainer and rollout then round the same real numbers.

An operation computes in more bits than its result has, and rounds once at the end. In FP64 the order of its sums no
longer affects the result, so that kernel, batch and split make no difference.
"""
