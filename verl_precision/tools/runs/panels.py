"""Which metrics are shown, in which panel, and where a panel finds them in a run."""

from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from verl_precision.mismatch import metric_names as keys
from verl_precision.tools.runs.read import Run


class Panel(NamedTuple):
    """One plot."""

    name: str  # its id on the page
    title: str
    unit: str  # label of the vertical axis
    metrics: Mapping[str, str]  # up to four by their label; of `a or b` the first is shown that a run has
    log: int = 0  # base of a logarithmic axis, on which only positive values are drawn; 0 for a linear axis
    hint: str = ""  # how to read the plot
    # What the horizontal axis counts; "layer" for a metric that ends in `_*`: the mean over all steps of each layer.
    axis: str = "step"

    def title_of(self, label: str) -> str:
        """Return the title of one curve, without the plot."""
        return self.title if len(self.metrics) == 1 else f"{self.title}: {label}"


_PEARSON = keys.PROBS_PEARSON  # shown as its distance from 1
_EXTREMES = {"max π - μ": keys.PROB_GAP_MAX, "min π - μ": keys.PROB_GAP_MIN}
_CLIP = {"A > 0": "actor/clip_fraction_high", "A < 0": "actor/clip_fraction_low"}
_CLIP |= {"all (verl's losses)": "actor/pg_clipfrac", "dual clip (verl's losses)": "actor/pg_clipfrac_lower"}
_ROUTING, _BY_LAYER = keys.ROUTING_AGREEMENT, f"{keys.ROUTING_AGREEMENT}/layer_*"
_DEEPER = "falls with depth: each difference makes others"
REWARD = Panel("reward", "Reward", "mean score", {"reward": "critic/score/mean or critic/rewards/mean"})
PANELS = (
    REWARD,
    Panel("length", "Response length", "tokens, mean", {"length": "response_length/mean"}),
    Panel("k3", "Mismatch: k3 KL(μ‖π)", "nats per token", {"k3": keys.K3_KL}, 10, "0 is best"),
    Panel("gap", "Mismatch: mean |log π - log μ|", "nats per token", {"gap": keys.LOG_PROB_GAP}, 10, "0 is best"),
    Panel("pearson", "1 - correlation of π and μ", "1 - Pearson's r", {"1 - r": _PEARSON}, 10, "0 is best"),
    Panel("extremes", "Extremes of π - μ", "probability", _EXTREMES, hint="towards ±1 before a collapse"),
    Panel("alpha_beta", "α (policy) and β (precision)", "nats, mean |·|", {"α": keys.ALPHA, "β": keys.BETA}, 10),
    Panel("beta_beyond", "Tokens with |β| beyond the clip range", "fraction", {"beyond": keys.BETA_BEYOND_CLIP}),
    Panel("phantom", "Phantom-clipped tokens", "fraction", {"phantom": keys.PHANTOM_CLIPPED}, hint="0 is best"),
    Panel("clip", "Clipped tokens", "fraction", _CLIP),
    Panel("routing", "Experts chosen as by the rollout", "share of choices", {"equal": _ROUTING}, hint="1 is best"),
    Panel(
        *("routing_by_layer", "Experts chosen as by the rollout, by layer", "share of choices, all steps"),
        *({"equal": _BY_LAYER}, 0, _DEEPER, "layer"),
    ),
    Panel("scale", "Loss scale", "S", {"scale": keys.LOSS_SCALE}, 2, "FP16 only"),
    Panel("skipped", "Skipped updates", "per step", {"skipped": keys.SKIPPED_STEPS}, hint="0 is best"),
    Panel("grad_norm", "Gradient norm", "before clipping", {"norm": "actor/grad_norm"}, 10),
)


def points_of(run: Run, metric: str) -> dict[int, float]:
    """Return a metric of a run by step, or by layer; where it was not measured there is no point, NaN stays."""
    if metric.endswith("_*"):
        names = sorted({name for row in run.rows for name in row if name.startswith(metric[:-1])})
        return {int(name.rpartition("_")[2]): fmean(row[name] for row in run.rows if name in row) for name in names}
    for key in metric.split(" or "):
        found = {int(row["step"]): value for row in run.rows if (value := keys.value_of(row, key)) is not None}
        if found:
            return {step: 1 - value for step, value in found.items()} if key == _PEARSON else found
    return {}
