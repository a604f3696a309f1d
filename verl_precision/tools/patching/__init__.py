"""`verl-precision patch`: the series of `patches/` and their hashes (series), and the trees that they change (tree)."""
