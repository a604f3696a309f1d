"""Whole runs: start verl once or in several precisions, follow it, and show what it left.

launch.py        one run: start verl, follow its log, leave nothing behind
compare.py       one recipe in several precisions, one after the other: `verl-precision compare`
stages.py        what verl is doing, read from its log
results.py       metrics of a run -> summary and table
pass_bar.py      is the reward above a bar, and since when?
fork_server.py   on a CPU, Ray's workers as forks of one process that has imported verl and vLLM
read.py          what a run left, from any logger's files
panels.py        which metrics are shown, under which title and unit
figures.py       how each metric looks over steps
page.py          one HTML page about one or more runs: `verl-precision report`
"""
