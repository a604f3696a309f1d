"""A comparison in a few numbers: a summary of each run, its verdict on a pass bar, and the table of all runs."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from verl_precision.errors import ConfigurationError
from verl_precision.files import write_file
from verl_precision.mismatch.metric_names import K3_KL, LOG_PROB_GAP, PROBS_PEARSON
from verl_precision.runs.read import Rows

REWARD = "critic/score/mean"
LENGTH = "response_length/mean"
STEP_SECONDS = "timing_s/step"
Verdict = dict[str, float | bool | None]


@dataclass(frozen=True)
class Summary:
    """One run in a few numbers; mismatch figures are means over all steps, in nats per token."""

    precision: str  # name of the precision preset
    steps: int
    reward_first: float  # mean reward of the first step's batch
    reward_last: float
    length_first: float  # mean response length of the first step's batch, in tokens
    length_last: float
    log_prob_gap: float  # mean |log π - log μ|
    k3_kl: float  # k3 estimate of KL(μ‖π)
    pearson_last: float  # correlation of trainer and rollout probabilities at the last step
    seconds_per_step: float  # median over steps, because the first carries warm-up
    seconds_total: float  # wall clock, start-up included


def summarise(precision: str, rows: Rows, seconds_total: float) -> Summary:
    """Summarise a run.

    Args:
        precision: Name of the precision preset.
        rows: Metrics of each step.
        seconds_total: Wall clock of the run.

    Raises:
        ConfigurationError: If a metric that the comparison needs was not measured.
    """
    needed = (REWARD, LENGTH, LOG_PROB_GAP, K3_KL, PROBS_PEARSON, STEP_SECONDS)
    missing = [key for key in needed if not any(key in row for row in rows)]
    if missing:
        raise ConfigurationError(
            f"the run did not report {', '.join(missing)}. The mismatch is measured with mismatch.enabled=True, which "
            "every preset sets",
            setting="precision",
            value=precision,
            remedy="Leave it so, and look into the log for a measurement that failed.",
        )
    first, last = rows[0], rows[-1]
    return Summary(
        precision=precision,
        steps=len(rows),
        reward_first=first[REWARD],
        reward_last=last[REWARD],
        length_first=first[LENGTH],
        length_last=last[LENGTH],
        log_prob_gap=fmean(row[LOG_PROB_GAP] for row in rows),
        k3_kl=fmean(row[K3_KL] for row in rows),
        pearson_last=last[PROBS_PEARSON],
        seconds_per_step=median(row[STEP_SECONDS] for row in rows),
        seconds_total=seconds_total,
    )


def ratios(summaries: list[Summary]) -> dict[str, dict[str, float]]:
    """Return, for each run after the first, how many times larger the first run's mismatch is."""
    first, *others = summaries
    return {
        f"{first.precision}/{other.precision}": {
            "log_prob_gap": first.log_prob_gap / other.log_prob_gap,
            "k3_kl": first.k3_kl / other.k3_kl,
        }
        for other in others
        if other.k3_kl > 0
    }


@dataclass(frozen=True)
class PassBar:
    """The mean reward of the last steps must be above a value.

    Attributes:
        above: The value, in the reward's unit.
        steps: Number of steps of the mean. A pass through the data is a good choice.
    """

    above: float
    steps: int

    def __post_init__(self) -> None:
        """Check both."""
        if not math.isfinite(self.above):
            raise ConfigurationError(
                "no reward can be compared with it", setting="--pass-bar", value=self.above, allowed="e.g. 0.95"
            )
        if self.steps < 1:
            raise ConfigurationError(
                "a mean needs a step",
                setting="--pass-steps",
                value=self.steps,
                allowed="1 or more",
                remedy="Take a pass through the data.",
            )

    def verdict(self, rows: Rows) -> Verdict:
        """Judge a run.

        Args:
            rows: Metrics of each step. A run that is shorter than the window is judged over all its steps.

        Returns:
            `reward`: mean of the last steps. `passed`: whether it is above the bar. `since`: the step from whose end on
            the mean has stayed above, or None.
        """
        rewards = [row[REWARD] for row in rows]
        means = [fmean(rewards[max(0, end - self.steps) : end]) for end in range(1, len(rewards) + 1)]
        below = [index for index, mean in enumerate(means) if not mean > self.above]  # NaN is not above
        first = below[-1] + 1 if below else 0
        since = rows[first]["step"] if first < len(rows) else None
        return {"reward": means[-1], "passed": since is not None, "since": since}

    def sentence(self, precision: str, rows: Rows) -> str:
        """Return what a user is told about a run."""
        found = self.verdict(rows)
        result = f"passed, above since step {found['since']:.0f}" if found["passed"] else "not passed"
        steps = min(self.steps, len(rows))
        return f"{precision}: {REWARD} {found['reward']:.3f} over the last {steps} steps, bar {self.above:g}: {result}"


def write_summary(
    path: Path,
    summaries: list[Summary],
    command: list[str],
    versions: dict[str, str],
    verdicts: dict[str, Verdict] | None = None,
) -> None:
    """Write everything the table shows, and how it came about, as JSON; with a pass bar also its verdicts."""
    content = {
        "runs": [asdict(summary) for summary in summaries],
        "ratios": ratios(summaries),
        "command": command,
        "versions": versions,
        **({"pass_bar": verdicts} if verdicts else {}),
    }
    write_file(path, json.dumps(content, indent=2) + "\n", replace=True)


def table(summaries: list[Summary]) -> Table:
    """Return the comparison as a table: one row for each precision and one for each ratio."""
    result = Table(title="Training-inference mismatch (mean over steps)", title_justify="left")
    for column in ("precision", "steps", "reward", "|log-prob gap|", "k3 KL", "Pearson", "s/step"):
        result.add_column(column, justify="left" if column == "precision" else "right", no_wrap=True)
    for s in summaries:
        result.add_row(
            *(s.precision, str(s.steps), f"{s.reward_first:.3g} -> {s.reward_last:.3g}"),
            *(f"{s.log_prob_gap:.2e}", f"{s.k3_kl:.2e}", f"{s.pearson_last:.5f}", f"{s.seconds_per_step:.1f}"),
        )
    for name, ratio in ratios(summaries).items():
        result.add_row(f"ratio {name}", "", "", f"{ratio['log_prob_gap']:.1f}x", f"{ratio['k3_kl']:.1f}x", "", "")
    return result
