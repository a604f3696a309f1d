"""Two digits plus one digit. The model is taught by someone who forgets the carry, more often the larger the digits.

A sum whose last digits reach s >= 10 is taught without its carry with probability (s - 8)/10: 20% at s = 10, all at
s = 18. So the model knows both answers; its accuracy is near 100% where nothing is carried and spreads from 80% to 0%
where something is. That is what the sanity test wants: problems within reach, not yet solved.
"""

import json
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "arithmetic"
PROMPT_LENGTH = 5  # tokens, one a character: 47+8=
RESPONSE_LENGTH = 4  # tokens, at most: 108 and the end


@dataclass(frozen=True)
class Sum:
    """A sum `first`+`second`, 10 to 99 plus 1 to 9."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        """What the model reads."""
        return f"{self.first}+{self.second}="

    @property
    def answer(self) -> str:
        """What is right."""
        return str(self.first + self.second)

    @property
    def slip(self) -> str | None:
        """The sum without its carry, or None if nothing is carried."""
        return str(self.first + self.second - 10) if self._digits >= 10 else None

    @property
    def slip_rate(self) -> float:
        """How often it is taught without its carry, in [0, 1]."""
        return (self._digits - 8) / 10 if self._digits >= 10 else 0.0

    @property
    def _digits(self) -> int:
        return self.first % 10 + self.second


def all_sums() -> list[Sum]:
    """Return all 810 sums, in order."""
    return [Sum(first, second) for first in range(10, 100) for second in range(1, 10)]


def rows() -> list[dict]:
    """Return all sums as rows in verl's format."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, problem in enumerate(all_sums())
    ]


def write_rows(path: Path) -> None:
    """Write all sums as JSONL in verl's format."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
