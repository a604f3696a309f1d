"""Whole runs: start verl once or in several precisions, follow it, and show its results.

compare/        one recipe in several precisions, estimators, arms and seeds: `verl-precision compare`
launch          one run: start verl, follow its progress, end every process of it
failure_report  why a run failed, from its log
read            rows: a run's metrics, from its metrics file or log
curves          which metrics are shown; a run's rows by metric, of a long curve a few hundred points
status          where a run stands: state, time left, its numbers now, and what its recipe promises
content         all of that as JSON, recorded or followed, and the tokens that a run has kept, for
figures         the panels of reward and mismatch as a picture, for `compare`
page            the page, whose script (`page.js`) draws it: as one file (`verl-precision report`), or
server          with the news of runs that train (`verl-precision watch`)
"""
