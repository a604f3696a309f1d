"""The training-inference mismatch, measured at every step; docs/metrics.md defines every number.

statistics  the gap between trainer and rollout: `MismatchSums`
phantom     the gap split into alpha and beta, and phantom clipping: `PhantomSums`
moments     the sums over tokens and responses
sums        state that merges over chunks, micro-batches and ranks
packing     from padded or jagged batches to chunks of valid tokens
classes     tokens by probability and by sign of the advantage
histogram   the gap on a fixed grid, and quantiles
alarm       says when a run is on its way to collapse, and what to do; fed the metrics of each step
detector    sustained growth, and persistence, of one number a step
remedies    what each alarm means and what to try
keys        names of the metrics that alarm and report read
settings    the block `mismatch` of a config
carry       sums from the worker's micro-batches to the driver
watch       what the measuring trainer does at each point of a step
trainer     verl's trainers, with all this among their metrics; `mismatch.enabled` chooses them

All but the last four import only torch, or nothing.
"""
