"""Whole runs: start verl once or in several precisions, follow it, and show its results.

compare/        one recipe in several precisions, estimators, arms and seeds: `verl-precision compare`
launch          one run: start verl, follow its progress, end every process of it
failure_report  why a run failed, from its log
read            a run's rows, from any logger's files, and on from where they were left
curves          which metrics are shown; a run's rows by metric, of a long curve a few hundred points
status          where a run stands: state, time left, its numbers now; `expected`: what its recipe promises
kept            the kept tokens of a run: a list of responses, and one of them
content         all of that as JSON, for
page            the page, whose script (`page.js`) draws it: as one file (`verl-precision report`), or
live, server    with the news of runs that train (`verl-precision watch`), and
figures         the figure of a comparison as PNG
"""
