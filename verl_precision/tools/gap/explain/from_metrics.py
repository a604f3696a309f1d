"""What a run has recorded about the causes of its gap, and what only a rerun can tell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.metric_names import value_of
from verl_precision.tools.gap.explain.causes import CAUSES
from verl_precision.weight_sync.canary import CANARY_BOUND, CANARY_GAP

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class RecordedCause:
    """What is known of one cause.

    Attributes:
        cause: Its name, as in `CAUSES`.
        seen: What was recorded, in words.
        fault: Whether something is wrong; None where it is a cost whose size a rerun tells.
        remedy: What to do about a fault.
    """

    cause: str
    seen: str
    fault: bool | None
    remedy: str = ""


def recorded_causes(settings: Mapping[str, Any] | None, replays_sampling: bool, rows: Rows) -> list[RecordedCause]:
    """Return what a run tells, in the order of the path, faults first.

    Args:
        settings: Of an `Explanation`, from the run's config; None if the run has left none.
        replays_sampling: Whether its trainer knows the tokens that top-p and top-k left out.
        rows: Metrics of each step.
    """
    found: dict[str, RecordedCause] = {}
    for one in (*(_of_config(settings, replays_sampling) if settings else ()), *_of_metrics(rows)):
        before = found.get(one.cause)
        found[one.cause] = one if before is None else replace(one, seen=f"{before.seen}; {one.seen}")
    order = list(CAUSES)
    return sorted(found.values(), key=lambda one: (not one.fault, order.index(one.cause)))


def gap_of(rows: Rows) -> str:
    """Return the whole gap of a run in words."""
    k3, gap = _values(rows, keys.K3_KL), _values(rows, keys.LOG_PROB_GAP)
    if not k3:
        return "The run has not measured its mismatch. Every preset sets mismatch.enabled=True."
    first, last = next(iter(k3)), list(k3)[-1]
    text = f"Steps {first:.0f} to {last:.0f}: k3 {fmean(k3.values()):.2e} on average, {k3[last]:.2e} at the last step"
    return text + (f"; mean |gap| {fmean(gap.values()):.2e} nats." if gap else ".")


def _of_config(settings: Mapping[str, Any], replays_sampling: bool) -> Iterator[RecordedCause]:
    if settings["raw_log_probs"]:
        untempered = settings["temperature"] != 1
        seen = f"logprobs_mode=raw_logprobs at temperature {settings['temperature']:g}"
        yield _of("temperature", seen, untempered)
    elif settings["top_p"] < 1 or settings["top_k"] > 0:
        seen = f"top_p {settings['top_p']:g}, top_k {settings['top_k'] or -1}"
        seen += "; the trainer replays the masks" if replays_sampling else ", and no masks are replayed"
        yield _of("sampling", seen, not replays_sampling)
    train, rollout = settings["train_dtype"], settings["rollout_dtype"]
    if train != rollout:
        yield _of("weight_rounding", f"trainer {train}, rollout {rollout}", None)
    for cause, dtype in (("rollout_precision", rollout), ("trainer_precision", train)):
        if dtype != "fp32":
            yield _of(cause, f"{dtype}, by the config", None)
    if not settings["fp32_log_probs"]:
        yield _of("log_probs", "16-bit log-probs, by the config", True)


def _of_metrics(rows: Rows) -> Iterator[RecordedCause]:
    gaps, bounds = _values(rows, CANARY_GAP), _values(rows, CANARY_BOUND)
    compared = sorted(gaps.keys() & bounds.keys())
    if wrong := [step for step in compared if not gaps[step] <= bounds[step]]:  # NaN is beyond, too
        yield _of("weights", f"canary beyond its bound after {len(wrong)} of {len(compared)} syncs, first at step "
                  f"{wrong[0]:.0f}: {gaps[wrong[0]]:.1e} nats, allowed {bounds[wrong[0]]:.1e}", True)  # fmt: skip
    elif compared:
        yield _of("weights", f"canary within its bound after all {len(compared)} syncs", False)
    if stale := _values(rows, keys.STALE_FRACTION):
        k3 = _values(rows, keys.K3_KL)
        fresh = _values(rows, keys.behind(0, keys.K3_KL))
        seen = f"{fmean(stale.values()):.1%} of the responses are behind"
        both = sorted(step for step in k3.keys() & fresh.keys() if stale.get(step))
        if both and (whole := sum(k3[step] for step in both)):
            share = 1 - sum(fresh[step] for step in both) / whole
            seen += f"; without them k3 is {share:.0%} smaller"
        yield _of("staleness", seen, False if not any(stale.values()) else None)
    if beta := _values(rows, keys.BETA):
        alpha = _values(rows, keys.ALPHA)
        yield _of("trainer_precision", f"the shadow: precision {fmean(beta.values()):.1e} nats, policy "
                  f"{fmean(alpha.values()):.1e}", None)  # fmt: skip
    if agreement := _values(rows, keys.ROUTING_AGREEMENT):
        yield _of("routing", f"{1 - fmean(agreement.values()):.2%} of the choices differ", None)


def _of(cause: str, seen: str, fault: bool | None) -> RecordedCause:
    return RecordedCause(cause, seen, fault, CAUSES[cause].remedy if fault else "")


def _values(rows: Rows, key: str) -> dict[float, float]:
    """Return the values of a metric by step."""
    return {row["step"]: value for row in rows if (value := value_of(row, key)) is not None}
