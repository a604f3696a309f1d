"""When a problem's verdict can no longer change, and which responses to draw next.

With k of m responses correct, n to be drawn in all, and n - m still open, the final number of correct responses lies
in [k, k + n - m]. A problem is kept if it ends in [⌈low n⌉, ⌊high n⌋], both ends included. The verdict is decided as
soon as that whole interval lies inside (kept), or outside (dropped); more responses cannot change it. Whole numbers
only, so that 20% of 40 is 8 and not 8.000000000000002.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from itertools import islice

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.tools.jobs.journal import START_AGAIN, Key


class Verdict(Enum):
    """The state of a problem."""

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
            problem = f"{self}: no accuracy of {self.responses} responses lies in this window: it keeps no problem"
            raise ConfigurationError(problem, remedy="Widen the window or draw more responses.")

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
        """Return the smallest number of further responses that can decide; drawing so many at once wastes none.

        Kept takes `fewest` correct and n - `most` wrong ones; dropped takes `most` + 1 correct or n - `fewest` + 1
        wrong ones.
        """
        if self.verdict(correct, drawn) is not Verdict.OPEN:
            return 0
        wrong = drawn - correct
        to_keep = max(self.fewest - correct, 0) + max(self.responses - self.most - wrong, 0)
        return min(to_keep, self.most + 1 - correct, self.responses - self.fewest + 1 - wrong)


@dataclass
class Tally:
    """The responses to one problem."""

    correct: dict[int, bool] = field(default_factory=dict)  # index of each response drawn -> whether it was correct
    tokens: int = 0  # of the responses drawn
    asked: set[int] = field(default_factory=set)  # indices handed out and not yet back

    @property
    def drawn(self) -> int:
        """Responses drawn."""
        return len(self.correct)

    @property
    def correct_count(self) -> int:
        """Correct ones among them."""
        return sum(self.correct.values())


class Schedule:
    """Hands out (problem, response index) pairs until every verdict is decided.

    Deciding early changes no verdict (see `Window.verdict`), so neither the number of responses in flight nor the order
    in which they come back changes the set that is kept.
    """

    def __init__(self, problems: Iterable[str], window: Window) -> None:
        """Start with nothing drawn."""
        self.window = window
        self.tallies = {problem: Tally() for problem in problems}
        self.total, self.drawn = len(self.tallies), 0  # problems, and responses counted
        self._open = dict.fromkeys(self.tallies)  # in order
        self._undecided = OrderedDict(self._open)  # those that need more than is in flight; begun ones first

    @property
    def done(self) -> int:
        """Number of problems that need no more responses."""
        return self.total - len(self._open)

    def verdict(self, problem: str) -> Verdict:
        """Return what is known of a problem."""
        tally = self.tallies[problem]
        return self.window.verdict(tally.correct_count, tally.drawn)

    def kept(self) -> list[str]:
        """Return the problems kept so far, in their order."""
        return [problem for problem in self.tallies if self.verdict(problem) is Verdict.KEPT]

    def count(self, problem: str, response: int, correct: bool, tokens: int) -> None:
        """Count a response, whether it comes from an engine or from the journal; one of no such index is refused."""
        tally = self.tallies.get(problem)
        if tally is None or not 0 <= response < self.window.responses or response in tally.correct:
            words = f"response {response} to problem {problem} is none of this job's, or was counted before"
            allowed = f"each response from 0 to {self.window.responses - 1} once, to a problem of the data set"
            raise CheckpointStateError(words, allowed=allowed, remedy=START_AGAIN)
        tally.asked.discard(response)
        tally.correct[response] = correct
        tally.tokens += tokens
        self.drawn += 1
        self._update(problem)

    def next_keys(self, limit: int) -> list[Key]:
        """Return up to `limit` responses to draw, first those that can decide the open problems soonest.

        If that is not enough, one more each in turn for the problems still open: some may turn out not to be needed.
        """
        keys: list[Key] = []
        while self._undecided and len(keys) < limit:
            problem = next(iter(self._undecided))
            keys += self._take(problem, min(self._needed(problem), limit - len(keys)))
            self._update(problem)
        while len(keys) < limit:
            more = [key for problem in islice(self._open, limit - len(keys)) for key in self._take(problem, 1)]
            if not more:
                break
            keys += more
        return keys

    def _needed(self, problem: str) -> int:
        tally = self.tallies[problem]
        return max(self.window.min_responses_to_decide(tally.correct_count, tally.drawn) - len(tally.asked), 0)

    def _take(self, problem: str, count: int) -> list[Key]:
        tally = self.tallies[problem]
        free = (i for i in range(self.window.responses) if i not in tally.correct and i not in tally.asked)
        taken = list(islice(free, count))
        tally.asked.update(taken)
        return [(problem, response) for response in taken]

    def _update(self, problem: str) -> None:
        """File a problem under what it needs now: nothing, responses in flight, or more."""
        if self.verdict(problem) is not Verdict.OPEN:
            self._open.pop(problem, None)
        if problem not in self._open or self._needed(problem) == 0:
            self._undecided.pop(problem, None)
        else:
            self._undecided[problem] = None
            self._undecided.move_to_end(problem, last=False)
