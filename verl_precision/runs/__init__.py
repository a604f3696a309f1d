"""Whole runs: start verl once or in several precisions, follow it, and show what it left.

compare.py       one recipe in several precisions, one after the other: `verl-precision compare`
launch.py        one run: start verl, say what it is doing, leave nothing behind
fork_server.py   on a CPU, Ray's workers as forks of one process that has imported verl and vLLM; with two scripts,
                 fork_client.py (stands in for `python`) and fork_template.py (the process that forks)
read.py          what a run left, from any logger's files
results.py       the metrics of a run as a summary, a table and a verdict on its pass bar
figures.py       which metrics are shown, and how they look over steps
page.py          one HTML page about one or more runs: `verl-precision report`
"""
