"""When can a problem's verdict no longer change? Whole numbers only, so that 20% of 40 is 8 and not 8.000000000000002.

With k of m responses correct, n to be drawn in all, and n - m still open, the final number of correct responses lies
in [k, k + n - m]. A problem is kept if it ends in [⌈low n⌉, ⌊high n⌋], both ends included. The verdict is decided as
soon as that whole interval lies inside (kept), or outside (dropped); more responses cannot change it.
"""

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from verl_precision.base.errors import ConfigurationError


class Verdict(Enum):
    """What is known of a problem."""

    OPEN = "open"
    KEPT = "kept"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Window:
    """The rule: the accuracies that are kept, both ends included."""

    responses: int = 40  # n
    low: Fraction = Fraction(1, 5)
    high: Fraction = Fraction(4, 5)

    def __post_init__(self) -> None:
        """Refuse a window that cannot keep anything."""
        if not 0 <= self.low <= self.high <= 1:
            raise ConfigurationError(str(self), allowed="0 <= low <= high <= 1", remedy="The paper keeps 0.2 to 0.8.")
        if self.fewest > self.most:
            raise ConfigurationError(
                f"{self}: no accuracy lies between them with {self.responses} responses, so nothing would be kept",
                remedy="Widen the window or draw more responses.",
            )

    def __str__(self) -> str:
        """Return the window as options of the command line."""
        return f"--low {float(self.low):g} --high {float(self.high):g}"

    @property
    def fewest(self) -> int:
        """Smallest final number of correct responses that is kept."""
        return math.ceil(self.low * self.responses)

    @property
    def most(self) -> int:
        """Largest final number of correct responses that is kept."""
        return math.floor(self.high * self.responses)

    def verdict(self, correct: int, drawn: int) -> Verdict:
        """Return what is known after m = `drawn` responses, k = `correct` of them correct."""
        left = self.responses - drawn
        if correct > self.most or correct + left < self.fewest:
            return Verdict.DROPPED
        if correct >= self.fewest and correct + left <= self.most:
            return Verdict.KEPT
        return Verdict.OPEN

    def min_responses_to_decide(self, correct: int, drawn: int) -> int:
        """Return how many more responses it takes at least to decide: drawing that many at once wastes none.

        Kept takes `fewest` correct and n - `most` wrong ones; dropped takes `most` + 1 correct or n - `fewest` + 1
        wrong ones.
        """
        if self.verdict(correct, drawn) is not Verdict.OPEN:
            return 0
        wrong = drawn - correct
        to_keep = max(self.fewest - correct, 0) + max(self.responses - self.most - wrong, 0)
        return min(to_keep, self.most + 1 - correct, self.responses - self.fewest + 1 - wrong)
