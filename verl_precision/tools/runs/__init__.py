"""Whole runs: start verl once or in several precisions, follow it, and show what it left.

compare.py       one recipe in several precisions, estimators, arms and seeds: `verl-precision compare`
grid.py          the runs of a comparison: which arms, which overrides each, which seeds
comparison_folder.py  the folder of a comparison: a new one, or that of the same command, which was interrupted
comparison_files.py   what its finished runs measured, and the files that show it
board.py         how far the runs are
launch.py        one run: start verl, say what it is doing, leave nothing behind
fork_server.py   on a CPU, Ray's workers as forks of one process that has imported verl and vLLM; with two scripts,
                 fork_client.py (stands in for `python`) and fork_template.py (the process that forks)
read.py          what a run left, from any logger's files
results.py       the metrics of a run as a summary, a table and a verdict on its pass bar
panels.py        which metrics are shown
figures.py       how they look over steps; seeds as bands
expected.py      the curves of the paper's figures, from the CSV file beside a recipe
page.py          one HTML page about one or more runs: `verl-precision report`
"""
