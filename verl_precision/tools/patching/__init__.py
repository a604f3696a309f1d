"""`verl-precision patch`: applies a whole series of `patches/` to a verl tree, or reverts it byte for byte."""
