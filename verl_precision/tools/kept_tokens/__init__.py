"""The tokens of a few responses of each step (`mismatch.keep_tokens`), with the loss's decision on each token."""
