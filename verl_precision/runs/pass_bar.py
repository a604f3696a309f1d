"""A recipe's pass bar: is the reward above it, and since when?"""

import math
from dataclasses import dataclass
from statistics import fmean

from verl_precision.errors import ConfigurationError
from verl_precision.runs.results import REWARD


@dataclass(frozen=True)
class PassBar:
    """The mean reward of the last steps must be above a value.

    Attributes:
        above: the value, in the reward's unit.
        steps: over how many steps the mean is taken; a pass through the data is a good choice.
    """

    above: float
    steps: int

    def __post_init__(self) -> None:
        """Check both."""
        if not math.isfinite(self.above):
            raise ConfigurationError(setting="--pass-bar", value=self.above, allowed="a finite number, e.g. 0.95")
        if self.steps < 1:
            raise ConfigurationError(
                setting="--pass-steps", value=self.steps, allowed="1 or more", remedy="Take a pass through the data."
            )

    def verdict(self, rows: list[dict[str, float]]) -> dict[str, float | bool | None]:
        """Judge a run.

        Args:
            rows: metrics of each step; a run shorter than the window is judged over all it has.

        Returns:
            `reward`: mean of the last steps. `passed`: whether it is above the bar. `since`: the step from whose end on
            the mean has stayed above, or None.
        """
        rewards = [row[REWARD] for row in rows]
        means = [fmean(rewards[max(0, end - self.steps) : end]) for end in range(1, len(rewards) + 1)]
        below = [index for index, mean in enumerate(means) if not mean > self.above]  # nan is not above
        first = below[-1] + 1 if below else 0
        since = rows[first]["step"] if first < len(rows) else None
        return {"reward": means[-1], "passed": since is not None, "since": since}

    def sentence(self, precision: str, rows: list[dict[str, float]]) -> str:
        """Return what to tell the user about a run."""
        found = self.verdict(rows)
        result = f"passed, above since step {found['since']:.0f}" if found["passed"] else "not passed"
        steps = min(self.steps, len(rows))
        return f"{precision}: {REWARD} {found['reward']:.3f} over the last {steps} steps, bar {self.above:g}: {result}"
