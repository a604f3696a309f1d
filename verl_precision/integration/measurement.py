"""The mismatch, measured in the worker while it updates: for bypass mode, and for α and β with a shadow.

The trainer asks for it by a request among a batch's data; see `mismatch.trainer`. What is measured travels back as
sums, not as numbers; see `mismatch.carry`.
"""

import logging
from typing import Any

from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from verl_precision.integration.summed_metrics import MISMATCH, PHANTOM, CarriedSums
from verl_precision.mismatch.phantom import PhantomSums
from verl_precision.mismatch.statistics import MismatchSums

# Key of the request among a batch's data.
REQUEST = "verl_precision_measure"

logger = logging.getLogger("verl_precision.mismatch")


def request(
    *, mismatch: bool, bypass: bool, clip_low: float, clip_high: float, ratio_threshold: float
) -> dict[str, bool | float]:
    """Return a request, plain data.

    Args:
        mismatch: whether the gap itself is to be measured here; in decoupled mode the driver does.
        bypass: whether the loss's ratio is taken against the rollout's log-probs.
        clip_low: ε_low of the loss.
        clip_high: ε_high of the loss.
        ratio_threshold: C.
    """
    return {
        "mismatch": mismatch,
        "bypass": bypass,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "ratio_threshold": ratio_threshold,
    }


def measure(
    asked: dict[str, Any], log_probs: Tensor, shadow_log_probs: Tensor | None, data: Any
) -> dict[str, CarriedSums]:
    """Measure one micro-batch; a failure is logged and costs the numbers of this micro-batch, never the run.

    Args:
        asked: of `request`.
        log_probs: nested, log π of prompt and response tokens from the training forward.
        shadow_log_probs: likewise from the shadow, or None.
        data: verl's micro-batch.
    """
    try:
        return _measure(asked, log_probs.detach(), shadow_log_probs, data)
    except Exception:  # somebody's run is under way, and does not need this number
        logger.exception("the mismatch of a micro-batch could not be measured; training goes on without it")
        return {}


def _measure(
    asked: dict[str, Any], log_probs: Tensor, shadow_log_probs: Tensor | None, data: Any
) -> dict[str, CarriedSums]:
    fields = ["response_mask", "advantages", "old_log_probs"]
    fields += ["rollout_log_probs"] if "rollout_log_probs" in data else []
    padded = data.select(*fields).to_padded_tensor()
    mask, advantages, old = (padded[name] for name in fields[:3])
    rollout = padded["rollout_log_probs"] if len(fields) > 3 else (old if asked["bypass"] else None)
    if rollout is None:
        raise KeyError("rollout_log_probs did not reach the worker")
    trainer = no_padding_2_padding(log_probs, data)
    found = {}
    if asked["mismatch"]:
        mismatch = MismatchSums(ratio_threshold=asked["ratio_threshold"])
        mismatch.update(trainer, rollout, mask, advantages)
        found[MISMATCH] = CarriedSums([mismatch])
    if shadow_log_probs is not None:
        phantom = PhantomSums(clip_low=asked["clip_low"], clip_high=asked["clip_high"])
        shadow = no_padding_2_padding(shadow_log_probs, data)
        against = None if asked["bypass"] else old
        phantom.update(trainer, shadow, rollout, mask, advantages, ratio_log_probs=against)
        found[PHANTOM] = CarriedSums([phantom])
    return found
