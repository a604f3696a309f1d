"""Which metrics are shown, under which title and unit, and where they lie in a run's rows."""

from dataclasses import dataclass

from verl_precision.mismatch import metric_names as keys
from verl_precision.runs.read import Run


@dataclass(frozen=True)
class Curve:
    """One line of a panel, for each run.

    Attributes:
        label: what it is called in legend and table.
        keys: where it is, the first that the run has.
        complement: whether 1 - value is shown, for a number whose distance from 1 is what matters.
    """

    label: str
    keys: tuple[str, ...]
    complement: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: its id on the page.
        title: above it.
        unit: of the vertical axis.
        curves: up to four.
        log: base of a logarithmic axis, on which values that are not positive are not drawn; 0 for a linear one.
        hint: how to read it.
    """

    name: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    log: int = 0
    hint: str = ""


def _panel(name: str, title: str, unit: str, key: str, log: int = 0, hint: str = "") -> Panel:
    return Panel(name, title, unit, (Curve(title, (key,)),), log, hint)


_PEARSON = (Curve("1 - r", (keys.PROBS_PEARSON,), complement=True),)
_EXTREMES = (Curve("max π - μ", (keys.PROB_GAP_MAX,)), Curve("min π - μ", (keys.PROB_GAP_MIN,)))
_CLIP = (
    Curve("A > 0", ("actor/clip_fraction_high",)),
    Curve("A < 0", ("actor/clip_fraction_low",)),
    Curve("all (verl's losses)", ("actor/pg_clipfrac",)),
    Curve("dual clip (verl's losses)", ("actor/pg_clipfrac_lower",)),
)
PANELS = (
    Panel("reward", "Reward", "mean score", (Curve("reward", ("critic/score/mean", "critic/rewards/mean")),)),
    _panel("length", "Response length", "tokens, mean", "response_length/mean"),
    _panel("k3", "Mismatch: k3 KL(μ‖π)", "nats per token", keys.K3_KL, 10, "0 is best"),
    _panel("gap", "Mismatch: mean |log π - log μ|", "nats per token", keys.LOG_PROB_GAP, 10, "0 is best"),
    Panel("pearson", "1 - correlation of π and μ", "1 - Pearson's r", _PEARSON, 10, "0 is best"),
    Panel("extremes", "Extremes of π - μ", "probability", _EXTREMES, hint="towards ±1 before a collapse"),
    Panel(
        *("alpha_beta", "α (policy) and β (precision)", "nats, mean |·|"),
        (Curve("α", (keys.ALPHA,)), Curve("β", (keys.BETA,))),
        log=10,
    ),
    _panel("beta_beyond", "Tokens with |β| beyond the clip range", "fraction", keys.BETA_BEYOND_CLIP),
    _panel("phantom", "Phantom-clipped tokens", "fraction", keys.PHANTOM, hint="0 is best"),
    Panel("clip", "Clipped tokens", "fraction", _CLIP),
    _panel("scale", "Loss scale", "S", keys.LOSS_SCALE, 2, "FP16 only"),
    _panel("skipped", "Skipped updates", "per step", keys.SKIPPED_STEPS, hint="0 is best"),
    _panel("grad_norm", "Gradient norm", "before clipping", "actor/grad_norm", 10),
)


def points_of(run: Run, curve: Curve) -> dict[int, float]:
    """Return the values of a run by step; steps at which it was not measured are left out, NaN stays."""
    for key in curve.keys:
        found = {int(row["step"]): value for row in run.rows if (value := keys.value_of(row, key)) is not None}
        if found:
            return {step: 1 - value for step, value in found.items()} if curve.complement else found
    return {}
