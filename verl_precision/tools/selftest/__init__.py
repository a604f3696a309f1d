"""`verl-precision selftest`: is this machine fit for FP16 RL? The acceptance test of a machine, for its owner.

session              what a check is; one process a check, the table, selftest.json
engine_checks        part A: verl's FSDP engine with ours on top, and what torch alone shows
single_rank          verl's engine outside of a training run: a group of one rank, whole sequences as a batch
stack_checks         part B, the whole stack: short runs of verl with vLLM, and faults that must stop a run
selftest_faults      faults that part B plants in its runs, each loaded by its name
"""
