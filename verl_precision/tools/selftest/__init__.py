"""`verl-precision selftest`: is this machine fit for FP16 RL? The acceptance test of a machine, for its owner.

    checks              every check: its part, what it shows, how long it may take, what it needs
    engine_checks       part A, the engine: overflows, log-probs, digest, experts
    stack_checks        part B, the whole stack: short runs of verl with vLLM, and faults that must stop a run
    session             one process a check, progress, the table, selftest.json

Checks of verl's own engine, and the faults that part B plants, are in `integration/selftest_*.py`.
"""
