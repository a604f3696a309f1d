"""The training-inference mismatch, measured at every step; docs/metrics.md defines every number.

monitor         `MismatchMonitor`, the entry for any training loop: from micro-batches to metrics, alarms and verdict
statistics      the gap between trainer and rollout: `MismatchStatistics`
phantom         the gap split into alpha and beta, and phantom clipping: `PhantomStatistics`
groups          the same statistics by age of the weights that sampled a response, and by turn of an agent loop
signal          what a batch can teach: equal rewards, advantages of 0, cut and repeated responses: `Signal`
candidates      chooses the responses whose tokens a run keeps
token_sums      the parts of the metrics: sums over tokens, classes of tokens, the histogram of the gap
fused           the same sums in one pass, by numba; fused_kernel: the compiled loops
packing         from padded or jagged batches to chunks of valid tokens
alarm           warns before a run collapses, with remedies
drift_detector  sustained growth, and persistence, of one number per step
metric_names    names of the metrics that alarm and report read
verdict         one word on a run, with the reason and an action
settings        the block `mismatch` of a config

integration/trainer/run_monitor.py runs all of this for one training run.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_precision.mismatch.monitor import MismatchMonitor as MismatchMonitor


def __getattr__(name: str) -> object:  # alarm and verdict are read without torch
    if name == "MismatchMonitor":
        from verl_precision.mismatch.monitor import MismatchMonitor

        return MismatchMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
