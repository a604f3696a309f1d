"""What a run that is over has recorded of the causes of its gap, and what only a rerun can tell."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.base.verl_config import lora_rank
from verl_precision.check.recipe_config import recorded_config
from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.alarm import first_alarms
from verl_precision.mismatch.metric_names import value_of
from verl_precision.tools.gap.explain.from_config import explained_by, replays_sampling
from verl_precision.tools.gap.explain.judge import CAUSES
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import variants
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.tables import terminal_table
from verl_precision.weight_sync.canary import CANARY_BOUND, CANARY_GAP

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class RecordedCause:
    """What is known of one cause."""

    cause: str  # its name, as in `CAUSES`
    seen: str  # what was recorded, in words
    fault: bool | None  # whether something is wrong; None where it is a cost whose size a rerun tells
    remedy: str = ""  # what to do about a fault


def read_run(source: Path) -> tuple[Run, DictConfig | None]:
    """Return a run's metrics and config; None where it has left no config.

    Args:
        source: A folder of `verl-precision compare`; a folder of checkpoints, whose metrics file stands beside it under
            the same name; or a metrics file.

    Raises:
        ConfigurationError: If there are no metrics, or those of several runs.
    """
    beside = source.with_name(f"{source.name}.jsonl")
    (run, *others) = read_runs([beside if beside.is_file() else source])
    if others:
        names = ", ".join(each.name for each in (run, *others))
        raise ConfigurationError(
            "there are several runs in it", setting="--run", value=str(source), allowed="one run",
            remedy=f"Name one of {names}.",
        )  # fmt: skip
    found = (recorded_config(folder) for folder in (source, run.path.parent, run.path.with_suffix("")))
    return run, next((config for config in found if config is not None), None)


def show_run(source: Path, console: Console) -> None:
    """Print what a run has recorded of the causes, and what a rerun would add."""
    run, config = read_run(source)
    settings = None if config is None else explained_by(config)
    found = recorded_causes(settings, config is not None and replays_sampling(config), run.rows)
    console.print(gap_of(run.rows), highlight=False, soft_wrap=True)
    faults = [one for one in found if one.fault]
    named = "; ".join(f"{one.cause}: {CAUSES[one.cause].title}" for one in faults)
    console.print(f"Something is wrong. {named}." if faults else "Nothing that is recorded is wrong.", soft_wrap=True)
    words = {True: "FAULT", False: "right", None: "a cost"}
    rows = [(one.cause, one.seen, words[one.fault]) for one in found]
    if found:
        console.print(terminal_table(("cause", "recorded", ""), rows, words=3, red=range(len(faults))))
    if alarms := first_alarms(run.rows):
        rung = ", ".join(f"{name} at step {step}" for name, step in alarms.items())
        console.print(f"Alarms: {rung}. What they mean: verl-precision report {run.path}", soft_wrap=True)
    for one in faults:
        console.print(f"{one.cause}: {one.remedy}.", highlight=False, soft_wrap=True)
    if config is None or settings is None:
        console.print("It has left no config. A rerun tells the share of each cause, and more of them:")
        console.print("verl-precision explain --recipe RECIPE.yaml", highlight=False)
        return
    job = Explanation(**settings)
    known = {one.cause for one in found if one.fault is not None}
    causes = ", ".join(one.cause for one in variants(job)[1:] if one.cause not in known)
    console.print(f"A rerun tells the share of each cause ({causes}) and what vLLM's operations do:", soft_wrap=True)
    options = shlex.join(as_options(Explanation, settings))
    console.print(f"verl-precision explain {options}", highlight=False, soft_wrap=True)
    if lora_rank(config):
        console.print(
            "It trains an adapter: add --adapter and the folder lora_adapter of a checkpoint.", soft_wrap=True
        )


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
