"""The verdict on a run: from the metrics of its steps to one word, the reason in numbers, and one action.

Pure Python; verl is not needed. Judged on recorded runs: docs/log/verdict.md.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Literal

from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.alarm import ADVICE, CAUSES, FEWEST, LIMITS, PATIENCE, Alarm, MismatchAlarm
from verl_precision.mismatch.drift_detector import SIGMA_PER_MAD

Word = Literal["healthy", "too short to judge", "watch", "act now"]
GRAVITY, OF_GAP = [name for cause in CAUSES.values() for name in cause], CAUSES["gap"]
WINDOW = 10  # steps of a mean reward, and of a median
ENOUGH = 0.5  # least share that a run keeps of a bound, or of its best reward; chosen on one half of the recorded runs
NOISES = 3  # a smaller change of a mean reward, in its standard errors, counts as none
_STALLS = ("low_effective_sample_size", "phantom_clipping")  # alarms about a gradient that is lost
_KEPT = {limit.metric for limit in LIMITS["low_effective_sample_size"]}
_READ = {limit.metric for limits in LIMITS.values() for limit in limits}
_READ |= {names.K3_KL, names.LOG_PROB_GAP, names.FAILED_MEASUREMENTS, names.REWARD, names.RESCUE}
_READ_LOG = "read the traceback after `could not be measured` in the run's log"


@dataclass(frozen=True)
class Verdict:
    """How a run is."""

    word: Word
    reason: str  # one sentence, the reason in numbers
    action: str  # one action: a word to add, or a command; "" where nothing is to do
    alarm: str = ""  # name of the alarm that decides; "" where none does

    def __str__(self) -> str:
        """Return the verdict as a line of text."""
        return f"{self.word}: {self.reason}" + (f". Next: {self.action}" if self.action else "")

    @property
    def exit_code(self) -> int:
        """Return 0 for a healthy run, 2 for one that needs an action now, 1 otherwise."""
        return {"healthy": 0, "act now": 2}.get(self.word, 1)


class Judge:
    """Takes the metrics of each step, with the alarm that a run has already or a new one, and gives the verdict."""

    def __init__(self, alarm: MismatchAlarm | None = None) -> None:
        self.alarm, self._steps, self._rescue = alarm or MismatchAlarm(), list[int](), False
        self._raised, self._active_at = dict[str, Alarm](), dict[str, int]()  # newest; last step of activity
        self._rewards, self._last = list[float](), dict[str, float]()  # newest value of each metric
        self._samples = deque[float](maxlen=WINDOW)  # the smallest effective sample of a step
        self._measured, self._failed = list[int](), 0  # steps

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """Take all metrics of one step, in the order of steps; return new alarms, as `MismatchAlarm.update` does."""
        raised, self._steps = self.alarm.update(step, metrics), [*self._steps[:1], step]
        self._raised |= {alarm.name: alarm for alarm in raised}
        self._active_at |= dict.fromkeys(self.alarm.active, step)
        found = {key: value for key in _READ if (value := names.value_of(metrics, key)) is not None}
        known = {key: value for key, value in found.items() if not math.isnan(value)}
        self._last |= known
        self._measured += [step] if names.K3_KL in known or names.LOG_PROB_GAP in known else []
        self._failed += known.get(names.FAILED_MEASUREMENTS, 0) > 0
        kept = [1 - value if key == names.REJECTED_TOKENS else value for key, value in known.items() if key in _KEPT]
        self._samples.extend([min(kept)] if kept else [])
        self._rewards += [found[names.REWARD]] if names.REWARD in found else []
        self._rescue = known.get(names.RESCUE) == 1
        return raised

    def verdict(self) -> Verdict:
        """Return the verdict on the steps so far."""
        found = self._by_active_alarms() if self._steps else Verdict("too short to judge", "no step is recorded", "")
        return replace(found, reason=f"a rescue in FP16: {found.reason}") if self._rescue else found

    def _by_active_alarms(self) -> Verdict:
        fallen, stalled, _ = self._reward()
        thin = bool(self._samples) and median(self._samples) < ENOUGH * FEWEST
        active = sorted(self.alarm.active, key=GRAVITY.index)
        for name in active:
            lost = name in _STALLS and bool(stalled) or name == _STALLS[0] and thin
            if ADVICE[name].severe or lost:
                return self._by("act now", name, stalled if name in _STALLS else fallen)
        newest = self._rewards[-PATIENCE["responses_not_finite"] :]
        if len(newest) == PATIENCE["responses_not_finite"] and not any(map(math.isfinite, newest)):
            reason = f"the reward is no number in {len(newest)} steps, up to step {self._steps[-1]}"
            return Verdict("act now", reason, "look at the reward function")
        if fallen and (of_gap := sorted({*self._active_at} & {*OF_GAP}, key=GRAVITY.index)):
            return self._by("act now", of_gap[0], fallen)
        if active:
            return self._by("watch", active[0], fallen)
        if fallen:
            return Verdict("watch", f"{fallen}, without an alarm about the gap", "verl-precision report FOLDER")
        return self._without_alarm()

    def _without_alarm(self) -> Verdict:
        now, past, baseline = self._steps[-1], self._active_at, self.alarm.settings.baseline_steps
        steps = f"in steps {self._steps[0]} to {now}" + (f", {self._failed} failed" if self._failed else "")
        if not self._measured:
            reason, action = f"nothing is measured {steps}", _READ_LOG if self._failed else "+mismatch.enabled=True"
            return Verdict("too short to judge", f"{reason}: there are no metrics `mismatch/`", action)
        if recent := [name for name, at in past.items() if now - at < baseline]:
            name = min(recent, key=GRAVITY.index)
            return self._by("watch", name, f"it has recovered since step {past[name]}")
        if now - self._measured[-1] > WINDOW:
            return Verdict("watch", f"nothing is measured since step {self._measured[-1]}, {steps}", _READ_LOG)
        reason = f"no alarm{f' since step {max(past.values())}' if past else ''} {steps}; {self._figures()}"
        if missing := max(0, self.alarm.baseline_missing):
            stale = " with responses of the current weights" if baseline - missing < len(self._measured) else ""
            return Verdict("too short to judge", f"{missing} more measured steps{stale} are needed; {reason}", "")
        return Verdict("healthy", reason, "")

    def _figures(self) -> str:
        shown = [f"k3 {self._last[names.K3_KL]:.3g}"] if names.K3_KL in self._last else []
        shown += [f"effective sample {median(self._samples):.3g}"] if self._samples else []
        return ", ".join(filter(None, [*shown, self._reward()[2]]))

    def _by(self, word: Word, name: str, more: str) -> Verdict:
        raised, begun = self._raised.get(name), self.alarm.active_since
        since = begun.get(name, raised.since_step if raised else self._steps[0])
        cause = next(cause for cause in CAUSES.values() if name in cause)
        first = min(cause, key=lambda each: begun.get(each, since if each == name else math.inf))  # to cure
        advice = ADVICE[first].without(self.alarm.in_use)
        reason = f"{name} since step {since}"
        if raised:
            seen, last = (f"{value:.3g}" for value in (raised.seen, self._last.get(raised.metric, raised.seen)))
            reason += f": {raised.metric} {seen}{f', now {last}' if last != seen else ''}, {raised.normal}"
        reason += f"; {more}" if more else ""
        return Verdict(word, reason, (*advice.try_first, "verl-precision explain --run FOLDER")[0], name)

    def _reward(self) -> tuple[str, str, str]:
        """Return in words that the reward has fallen, that it is no higher than at the start, and its course, or ""."""
        rewards = [value for value in self._rewards if math.isfinite(value)]
        if (width := min(WINDOW, len(rewards) // 3)) < 3:
            return "", "", ""
        sums, changes = [0.0, *accumulate(rewards)], [abs(b - a) for a, b in pairwise(rewards)]
        means = [(b - a) / width for a, b in zip(sums, sums[width:], strict=False)]
        noise = NOISES * SIGMA_PER_MAD * median(changes) / math.sqrt(2 * width)
        first, best, last = means[0], max(means), means[-1]
        gain_lost = best - first > noise and last - first < ENOUGH * (best - first)
        fell = best - last > noise and (gain_lost or 0 < best and last < ENOUGH * best)
        course = f"reward {first:.3g} to {last:.3g}"
        return f"reward fell from {best:.3g} to {last:.3g}" if fell else "", course * (last - first <= noise), course
