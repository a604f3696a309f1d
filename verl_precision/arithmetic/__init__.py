"""The sanity test on a CPU: sums such as `47+8=`, and a small model that is right on them sometimes.

task     the sums, the habit of forgetting the carry, rows in verl's format (pure)
model    trained from scratch in under a minute, kept in the cache
reward   exact match, with verl's signature
command  the command line
"""
