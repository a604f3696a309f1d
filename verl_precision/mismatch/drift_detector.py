"""The two detectors of the alarm, as plain arithmetic on one number per step: sustained growth, and persistence.

Each detector fires once, and again only after a clear recovery. Their state is plain JSON.
"""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

# A normal distribution's standard deviation over its median absolute deviation.
SIGMA_PER_MAD = 1.4826
# A condition comes back if it holds in RETURNS times `steps` measurements, in one of EVERY measurements or more.
RETURNS, EVERY = 2, 4


@dataclass
class Persistence:
    """A condition that holds in `steps` (≥ 1) measurements in a row, or that comes back.

    It comes back if it holds in `RETURNS` times as many measurements, in one of `EVERY` or more. It has recovered
    after `steps` measurements (at least `EVERY`) without the condition. A step without measurement changes nothing.
    """

    steps: int
    recent: list[int | None] = field(default_factory=list)  # of each measurement: its step, None if it does not hold
    since: int | None = None  # while active, the first step of the evidence
    active: bool = False  # has fired and not recovered

    def update(self, step: int, holds: bool) -> bool:
        """Take one measurement; return whether the detector fires now."""
        if holds or self.recent:
            self.recent = [*self.recent, step if holds else None][-EVERY * RETURNS * self.steps + EVERY - 1 :]
        if self.active and all(each is None for each in self.recent[-max(self.steps, EVERY) :]):
            self.recent, self.since, self.active = [], None, False
        if self.active or not holds:
            return False
        run, held = self.recent[-self.steps :], [each for each in self.recent if each is not None]
        if len(run) == self.steps and None not in run:
            self.since = run[0]
        elif len(held) >= RETURNS * self.steps:
            self.since = held[0]
        self.active = self.since is not None
        return self.active

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"recent": [*self.recent], "since": self.since, "active": self.active}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.recent, self.active = [*state["recent"]], state["active"]
        self.since = state["since"] if self.active else None


@dataclass
class Growth:
    """Sustained growth of a positive number above its own baseline: a one-sided CUSUM on a bounded score.

        x = power · log max(value, floor);  m, σ = median and 1.4826 MAD of x over the first `baseline_steps` values
        tolerance = max(log allowed_growth, 2σ)
        score = clip(2 (x - m) / tolerance - 2, -1, 1);  S ← clip(S + score, 0, evidence_steps)

    The score is 0 at the allowed level, 1 from tolerance/2 above it and -1 from tolerance/2 below it (all in nats): S
    counts steps of evidence. The detector fires when S reaches `evidence_steps`, or when scores of 1 come back often
    enough for `Persistence`, although S returns to 0 in between. It has recovered when S is 0 and these scores end.
    CUSUM: Page, Continuous Inspection Schemes, Biometrika 41 (1954), https://doi.org/10.1093/biomet/41.1-2.100.

    NaN is ignored, and so is an infinite value in the baseline. After the baseline, infinity is a full step of growth.
    """

    power: int  # 1, or 2 for a number that grows with the square root of the quantity of `allowed_growth`
    floor: float  # smaller values count as this: the rounding of equal numbers in float32 is no growth
    baseline_steps: int
    allowed_growth: float  # factor above the baseline that is tolerated for ever, > 1
    evidence_steps: int  # full steps of evidence before it fires
    baseline: list[float] = field(default_factory=list)  # x of the baseline so far, nats
    evidence: float = 0.0  # S, steps
    since: int | None = None  # the step at which S last left 0, or returning scores of 1 began; None without either
    active: bool = False  # has fired and not recovered
    returning: Persistence = field(init=False)  # scores of 1

    def __post_init__(self) -> None:
        """Create the detector for scores of 1."""
        self.returning = Persistence(self.evidence_steps)

    def update(self, step: int, value: float) -> bool:
        """Take the value of one step; return whether the detector fires now."""
        if math.isnan(value):
            return False
        log_value = self.power * math.log(max(value, self.floor))
        if len(self.baseline) < self.baseline_steps:
            if math.isfinite(log_value):
                self.baseline.append(log_value)
            return False
        centre, tolerance = self.reference()
        score = min(1.0, max(-1.0, 2 * (log_value - centre) / tolerance - 2))
        self.evidence = min(float(self.evidence_steps), max(0.0, self.evidence + score))
        comes_back = self.returning.update(step, score == 1)
        if self.evidence == 0 and not self.returning.active:
            self.since, self.active = None, False
            return False
        if self.since is None:
            self.since = step
        if self.active or not (comes_back or self.evidence == self.evidence_steps):
            return False
        self.active, self.since = True, min(self.since, self.returning.since or self.since)
        return True

    def reference(self) -> tuple[float, float]:
        """Return (m, tolerance) of a complete baseline, nats."""
        centre = median(self.baseline)
        sigma = SIGMA_PER_MAD * median(abs(x - centre) for x in self.baseline)
        return centre, max(math.log(self.allowed_growth), 2 * sigma)

    def allowed(self) -> tuple[float, float]:
        """Return the usual and the allowed value of a complete baseline."""
        centre, tolerance = self.reference()
        return math.exp(centre / self.power), math.exp((centre + tolerance) / self.power)

    def normal(self) -> str:
        """Return the baseline and the allowed value in words."""
        usual, allowed = self.allowed()
        return f"baseline of the first {self.baseline_steps} steps {usual:.3g}, allowed {allowed:.3g}"

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        own = {"baseline": [*self.baseline], "evidence": self.evidence, "since": self.since, "active": self.active}
        return {**own, "returning": self.returning.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state; a baseline of another length is completed, or cut to the first steps."""
        self.baseline = [float(x) for x in state["baseline"]][: self.baseline_steps]
        self.evidence = min(float(state["evidence"]), float(self.evidence_steps))
        self.since, self.active = state["since"], bool(state["active"])
        self.returning.load(state["returning"])
