"""Which responses to draw next: those that some verdict needs first, more only where an engine would idle."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from verl_precision.base.errors import CheckpointStateError
from verl_precision.tools.jobs.frame import Key
from verl_precision.tools.sanity_set.window import Verdict, Window


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

    def __init__(self, problems: Iterable[str], window: Window, early_stopping: bool = True) -> None:
        """Start with nothing drawn; without `early_stopping`, all n responses to each problem will be."""
        self.window, self.early_stopping = window, early_stopping
        self.tallies = {problem: Tally() for problem in problems}
        self.total, self.in_flight = len(self.tallies), None
        self._open = dict.fromkeys(self.tallies)  # in order
        self._undecided = OrderedDict(self._open)  # those that need more than is in flight; begun ones first

    @property
    def done(self) -> int:
        """Number of problems that need no more responses."""
        return self.total - len(self._open)

    @property
    def drawn(self) -> int:
        """Number of responses counted."""
        return sum(tally.drawn for tally in self.tallies.values())

    def verdict(self, problem: str) -> Verdict:
        """Return what is known of a problem."""
        tally = self.tallies[problem]
        if not self.early_stopping and tally.drawn < self.window.responses:
            return Verdict.OPEN
        return self.window.verdict(tally.correct_count, tally.drawn)

    def kept(self) -> list[str]:
        """Return the problems kept so far, in their order."""
        return [problem for problem in self.tallies if self.verdict(problem) is Verdict.KEPT]

    def count(self, problem: str, response: int, correct: bool, tokens: int) -> None:
        """Count a response, whether it comes from an engine or from the journal; one of no such index is refused."""
        tally = self.tallies.get(problem)
        if tally is None or not 0 <= response < self.window.responses or response in tally.correct:
            reason = "unknown problem" if tally is None else "counted before" if response in tally.correct else "index"
            raise CheckpointStateError(
                f"response {response} to problem {problem} cannot be counted ({reason})",
                allowed=f"each response from 0 to {self.window.responses - 1} once, to a problem of the data set",
                remedy="Start again in a new --output.",
            )
        tally.asked.discard(response)
        tally.correct[response] = correct
        tally.tokens += tokens
        self._update(problem)

    def next_keys(self, limit: int) -> list[Key]:
        """Hand out up to `limit` responses to draw: first those that it takes at least to decide each open problem.

        If that is not enough, one more each in turn for the problems still open: some may turn out not to be needed.
        """
        chosen: list[Key] = []
        while self._undecided and len(chosen) < limit:
            problem = next(iter(self._undecided))
            chosen += self._take(problem, min(self._needed(problem), limit - len(chosen)))
            self._update(problem)
        while len(chosen) < limit:
            more = [pair for problem in islice(self._open, limit - len(chosen)) for pair in self._take(problem, 1)]
            if not more:
                break
            chosen += more
        return chosen

    def _needed(self, problem: str) -> int:
        tally = self.tallies[problem]
        needed = self.window.responses - tally.drawn
        if self.early_stopping:
            needed = self.window.min_responses_to_decide(tally.correct_count, tally.drawn)
        return max(needed - len(tally.asked), 0)

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
