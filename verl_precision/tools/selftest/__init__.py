"""`verl-precision selftest`: the acceptance test of a machine for FP16 RL."""
