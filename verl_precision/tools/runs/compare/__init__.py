"""One recipe in several arms, one folder, one table (`verl-precision compare`).

grid      the runs of a comparison: its arms, their overrides, the seeds
run       a comparison from end to end: its folder, its runs, and the files that show it
summary   each run in a few numbers, its verdict on a pass bar; the table of all runs, and the figure of their curves
"""
