"""After a weight sync, are the rollout's weights the trainer's? Two witnesses (docs/weight_sync.md): bits, canary.

manifest  digests of all tensors that the trainer sends, compared with what the rollout receives
verify    each layer of the rollout, compared with one that is built afresh from the weights it was sent
report    what the rollout could verify, sent back to the trainer in a file
canary    log-probs of fixed sequences, compared with the trainer's; settings: its settings
"""
