"""Whole runs: start verl once or in several precisions, follow it, and show its results.

grid            the runs of a comparison: which arms, which overrides each, which seeds
compare/        one recipe in several precisions, estimators, arms and seeds: `verl-precision compare`
launch          one run: start verl, follow its progress, end every process of it
failure_report  why a run failed, from its log
read            the metrics of a run, from any logger's files, and on from where they were left
rows            the rows of a metrics file, a console log or TensorBoard events; else the line that is none
expected        the curves of the paper's figures, and of a run's recipe
panels          which metrics are shown, under which titles and in which colours
figures         metrics over steps as PNG: those of `compare`
contents        what the page shows, as JSON: curves of a few hundred points, alarms, summaries; CSV of all points
standing        where a run stands: state, time left, its numbers now
kept            the kept tokens of a run: a list of responses, and one of them
page            the page, whose script (`page.js`) draws it: as one file (`verl-precision report`), or
live, server    with the news of runs that train (`verl-precision watch`)
"""
