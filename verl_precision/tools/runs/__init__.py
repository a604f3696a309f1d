"""Whole runs: start verl once or in several precisions, follow it, and show its results.

compare/        one recipe in several precisions, estimators, arms and seeds: `verl-precision compare`
launch          one run: start verl, follow its progress, end every process of it
failure_report  why a run failed, from its log
read            rows: a run's metrics, from its metrics file or log
curves          which metrics are shown; a run's rows by metric, and a long curve as a few hundred points
status          a run's status: state, time left, latest numbers, and the reward that its recipe expects
content         all of this as JSON, for recorded and live runs, and a run's kept tokens
page            the HTML page, which its script (`page.js`) draws: as one file (`verl-precision report`)
server          the same page with updates from runs that train (`verl-precision watch`)
"""
