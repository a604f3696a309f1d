"""Which metrics are shown, under which title and unit, and where they lie in a run's rows."""

from dataclasses import dataclass

from verl_precision.mismatch import keys
from verl_precision.report.read import Run


@dataclass(frozen=True)
class Curve:
    """One line of a panel, for each run.

    Attributes:
        label: what it is called in legend and table.
        keys: where it is, the first that the run has.
        alarms: names of the alarms about it.
        complement: whether 1 - value is shown, for a number whose distance from 1 is what matters.
    """

    label: str
    keys: tuple[str, ...]
    alarms: tuple[str, ...] = ()
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


def _panel(name: str, title: str, unit: str, key: str, *alarms: str, log: int = 0, hint: str = "") -> Panel:
    return Panel(name, title, unit, (Curve(title, (key,), alarms),), log, hint)


PANELS = (
    Panel("reward", "Reward", "mean score", (Curve("reward", ("critic/score/mean", "critic/rewards/mean")),)),
    _panel("length", "Response length", "tokens, mean", "response_length/mean"),
    _panel("k3", "Mismatch: k3 KL(μ‖π)", "nats per token", keys.K3_KL, "k3_growth", log=10, hint="0 is best"),
    _panel(
        *("gap", "Mismatch: mean |log π - log μ|", "nats per token", keys.LOG_PROB_GAP),
        *("gap_growth", "mismatch_not_finite"),
        log=10,
        hint="0 is best",
    ),
    Panel(
        "pearson",
        "1 - correlation of π and μ",
        "1 - Pearson's r",
        (Curve("1 - r", (keys.PROBS_PEARSON,), ("policies_differ",), complement=True),),
        log=10,
        hint="0 is best",
    ),
    Panel(
        "extremes",
        "Extremes of π - μ",
        "probability",
        (
            Curve("max π - μ", (keys.PROB_GAP_MAX,), ("extreme_prob_gap",)),
            Curve("min π - μ", (keys.PROB_GAP_MIN,), ("extreme_prob_gap",)),
        ),
        hint="towards ±1 before a collapse",
    ),
    Panel(
        "alpha_beta",
        "α (policy) and β (precision)",
        "nats, mean |·|",
        (Curve("α", (keys.ALPHA,)), Curve("β", (keys.BETA,))),
        log=10,
    ),
    _panel(
        *("beta_beyond", "Tokens with |β| beyond the clip range", "fraction", keys.BETA_BEYOND_CLIP, "beta_beyond_clip")
    ),
    _panel("phantom", "Phantom-clipped tokens", "fraction", keys.PHANTOM, "phantom_clipping", hint="0 is best"),
    Panel(
        "clip",
        "Clipped tokens",
        "fraction",
        (
            Curve("A > 0", ("actor/clip_fraction_high",)),
            Curve("A < 0", ("actor/clip_fraction_low",)),
            Curve("all (verl's losses)", ("actor/pg_clipfrac",)),
            Curve("dual clip (verl's losses)", ("actor/pg_clipfrac_lower",)),
        ),
    ),
    _panel("scale", "Loss scale", "S", keys.LOSS_SCALE, "loss_scale_at_minimum", log=2, hint="FP16 only"),
    _panel("skipped", "Skipped updates", "per step", keys.SKIPPED_STEPS, "skipped_step_storm", hint="0 is best"),
    Panel("grad_norm", "Gradient norm", "before clipping", (Curve("gradient norm", ("actor/grad_norm",)),), log=10),
)


def points_of(run: Run, curve: Curve) -> list[tuple[int, float]]:
    """Return (step, value) of a run; steps at which it was not measured are left out, NaN stays."""
    for key in curve.keys:
        points = [(int(row["step"]), value) for row in run.rows if (value := keys.value_of(row, key)) is not None]
        if points:
            return [(step, 1 - value) for step, value in points] if curve.complement else points
    return []
