"""The training-inference mismatch, measured at every step; docs/metrics.md defines every number.

statistics      the gap between trainer and rollout: `MismatchStatistics`
phantom         the gap split into alpha and beta, and phantom clipping: `PhantomStatistics`
groups          the same by how many versions of the weights a response is behind, and by turn of an agent loop
candidates      which responses' tokens a run keeps
token_sums      what the metrics are made of: sums over tokens, their classes, the histogram of the gap
fused           the same sums in one pass, by numba; fused_kernel: the compiled loops
packing         from padded or jagged batches to chunks of valid tokens
alarm           says when a run is on its way to collapse, and what to do
drift_detector  sustained growth, and persistence, of one number a step
metric_names    names of the metrics that alarm and report read
settings        the block `mismatch` of a config

integration/trainer/run_monitor.py measures, judges and remembers for one run.
"""
