"""The tokens of a few responses of each step (`mismatch.keep_tokens`), and what losses decide of each."""
