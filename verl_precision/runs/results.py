"""What a run measured: from verl's metrics file to a summary of a few numbers and a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from verl_precision.errors import ConfigurationError
from verl_precision.files import write_file

REWARD = "critic/score/mean"
LENGTH = "response_length/mean"
GAP = "mismatch/log_prob_gap_abs_mean"
K3 = "mismatch/k3_kl"
PEARSON = "mismatch/probs_pearson"
STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Summary:
    """One run in a few numbers; mismatch figures are means over all steps.

    Attributes:
        precision: name of the precision preset.
        steps: training steps done.
        reward_first: mean reward of the first step's batch.
        reward_last: mean reward of the last step's batch.
        length_first: mean response length of the first step's batch, tokens.
        length_last: mean response length of the last step's batch, tokens.
        log_prob_gap: mean |log π - log μ| per token, nats.
        k3_kl: k3 estimate of KL(μ‖π) per token, nats.
        pearson_last: correlation of trainer and rollout probabilities at the last step.
        seconds_per_step: median over steps; the first step carries warm-up.
        seconds_total: wall clock, start-up included.
    """

    precision: str
    steps: int
    reward_first: float
    reward_last: float
    length_first: float
    length_last: float
    log_prob_gap: float
    k3_kl: float
    pearson_last: float
    seconds_per_step: float
    seconds_total: float


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, in order; verl's file logger writes one JSON object a line."""
    return [{"step": row["step"], **row["data"]} for row in map(json.loads, path.read_text().splitlines())]


def summarise(precision: str, rows: list[dict[str, float]], seconds_total: float) -> Summary:
    """Summarise a run.

    Args:
        precision: name of the precision preset.
        rows: metrics of each step.
        seconds_total: wall clock of the run.

    Raises:
        ConfigurationError: if a metric the comparison needs was not measured.
    """
    missing = [key for key in (REWARD, LENGTH, GAP, K3, PEARSON, STEP_SECONDS) if not any(key in row for row in rows)]
    if missing:
        raise ConfigurationError(
            f"the run did not report {', '.join(missing)}. The mismatch is measured with mismatch.enabled=True, which "
            "every preset sets",
            setting="precision",
            value=precision,
            remedy="Leave it so, and look into the log for a measurement that failed.",
        )
    return Summary(
        precision=precision,
        steps=len(rows),
        reward_first=rows[0][REWARD],
        reward_last=rows[-1][REWARD],
        length_first=rows[0][LENGTH],
        length_last=rows[-1][LENGTH],
        log_prob_gap=fmean(row[GAP] for row in rows),
        k3_kl=fmean(row[K3] for row in rows),
        pearson_last=rows[-1][PEARSON],
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


def write_summary(
    path: Path,
    summaries: list[Summary],
    command: list[str],
    versions: dict[str, str],
    verdicts: dict[str, dict[str, float | bool | None]] | None = None,
) -> None:
    """Write everything the table shows, and how it came about, as JSON; `verdicts` on a pass bar, if there is one."""
    content = {
        "runs": [asdict(summary) for summary in summaries],
        "ratios": ratios(summaries),
        "command": command,
        "versions": versions,
        **({"pass_bar": verdicts} if verdicts else {}),
    }
    write_file(path, json.dumps(content, indent=2) + "\n", replace=True)


def table(summaries: list[Summary]) -> Table:
    """Return the comparison as a table, one row a precision and one for each ratio."""
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
