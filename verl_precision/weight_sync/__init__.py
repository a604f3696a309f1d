"""Does the rollout hold the trainer's weights after a weight sync? Two tests: bits and canary (docs/weight_sync.md).

manifest  digests of all tensors that the trainer sends, compared with those of the received tensors
verify    compares each layer of the rollout with a layer that is rebuilt from the sent weights
report    returns the result of the verification to the trainer, in a file
canary    log-probs of fixed sequences, compared with the trainer's; settings: of rounding and canary
"""
