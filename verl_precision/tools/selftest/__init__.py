"""`verl-precision selftest`: is this machine fit for FP16 RL? The acceptance test of a machine, for its owner."""
