"""One recipe in several arms, one folder, one table (`verl-precision compare`).

grid      its runs: which arms, which overrides each, which seeds
folder    a new folder, or that of the same command, which was interrupted
run       a comparison from end to end, and the files that show it
summary   each run in a few numbers, its verdict on a pass bar, and the table of all runs
"""
