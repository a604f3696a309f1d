"""Whole runs: start verl once or in several precisions, follow it, and show its results.

grid            the runs of a comparison: which arms, which overrides each, which seeds
compare/        one recipe in several precisions, estimators, arms and seeds: `verl-precision compare`
launch          one run: start verl, follow its progress, end every process of it
fork_server     on a CPU, Ray's workers as forks of one process that has imported verl and vLLM; with two scripts,
                `fork_client` (stands in for `python`) and `fork_template` (the process that forks)
failure_report  why a run failed, from its log
read            the metrics of a run, from any logger's files; the curves of the paper's figures
figures         which metrics are shown, and how they look over steps; seeds as bands
page            one HTML page about one or more runs: `verl-precision report`
"""
