"""One recipe in several arms, one folder, one table (`verl-precision compare`).

run       a comparison from end to end
folder    a new folder, or that of the same command, which was interrupted
outputs   the results of the finished runs, and the files that show them
summary   each run in a few numbers, its verdict on a pass bar, and the table of all runs
"""
