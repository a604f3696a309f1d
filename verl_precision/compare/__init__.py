"""Run one recipe in several precisions, one after the other, and compare what they measured.

run       one variant: start verl, follow its log, leave nothing behind
stages    what verl is doing, read from its log
failure   why a run failed, read from its log
results   metrics of a run -> summary, table
pass_bar  is the reward above a bar, and since when?
figure    reward and mismatch over steps, as PNG
"""
