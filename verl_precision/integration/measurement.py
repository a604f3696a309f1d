"""The mismatch, measured in the worker while it updates: for bypass mode, and for α and β with a shadow.

The trainer asks for it by a request among a batch's data (`run_monitor.py`). What is measured travels back as
statistics that merge, not as numbers (`merged_metrics.py`).
"""

import logging
from typing import Any, TypedDict

from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from verl_precision.integration.merged_metrics import MergedMetric
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.statistics import MismatchStatistics

# Key of the request among a batch's data.
REQUEST = "verl_precision_measure"
# Keys of what comes back.
MISMATCH = "verl_precision/mismatch_statistics"
PHANTOM = "verl_precision/phantom_statistics"

logger = logging.getLogger("verl_precision.mismatch")


class Request(TypedDict):
    """What the trainer asks the worker to measure; plain data, because it travels with a batch."""

    mismatch: bool  # is the gap itself measured here? in decoupled mode the driver does that
    bypass: bool  # is the loss's ratio taken against the rollout's log-probs?
    clip_range: tuple[float, float]  # ε_low and ε_high of the loss
    ratio_threshold: float  # C


def measure(request: Request, log_probs: Tensor, shadow_log_probs: Tensor | None, data: Any) -> dict[str, MergedMetric]:
    """Measure one micro-batch; a failure is logged and costs the numbers of this micro-batch, never the run.

    Args:
        request: What to measure.
        log_probs: Nested, log π of prompt and response tokens from the training forward.
        shadow_log_probs: Likewise from the shadow, or None.
        data: verl's micro-batch.
    """
    try:
        return _measure(request, log_probs.detach(), shadow_log_probs, data)
    except Exception:  # somebody's run is under way, and does not need this number
        logger.exception("the mismatch of a micro-batch could not be measured; training goes on without it")
        return {}


def _measure(
    request: Request, log_probs: Tensor, shadow_log_probs: Tensor | None, data: Any
) -> dict[str, MergedMetric]:
    fields = ["response_mask", "advantages", "old_log_probs"]
    if "rollout_log_probs" in data:
        fields.append("rollout_log_probs")
    elif not request["bypass"]:
        raise KeyError("rollout_log_probs did not reach the worker")
    padded = data.select(*fields).to_padded_tensor()
    mask, advantages, old = (padded[name] for name in fields[:3])
    rollout = padded[fields[-1]]  # in bypass mode the old log-probs are the rollout's
    trainer = no_padding_2_padding(log_probs, data)
    found = {}
    if request["mismatch"]:
        mismatch = MismatchStatistics.measure(trainer, rollout, mask, advantages, request["ratio_threshold"])
        found[MISMATCH] = MergedMetric([mismatch])
    if shadow_log_probs is not None:
        shadow, against = no_padding_2_padding(shadow_log_probs, data), None if request["bypass"] else old
        phantom = PhantomStatistics.measure(trainer, shadow, rollout, mask, advantages, against, *request["clip_range"])
        found[PHANTOM] = MergedMetric([phantom])
    return found
