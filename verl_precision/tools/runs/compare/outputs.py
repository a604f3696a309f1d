"""What the finished runs of a comparison measured, and the files that show it."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.compare.folder import SUMMARY, UNDRAWN, seconds_of_runs
from verl_precision.tools.runs.compare.summary import PassBar, Summary, summarise, write_summary
from verl_precision.tools.runs.expected import expected_of
from verl_precision.tools.runs.figures import COMPARED, draw_comparison
from verl_precision.tools.runs.grid import PlannedRun, preset_of
from verl_precision.tools.runs.page import page, write_page
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.figures import write_png

FIGURE, REPORT = "comparison.png", "report.html"


class Results:
    """What the finished runs of a plan measured, and the files that show it. Runs are added from any thread.

    The plan has all runs in order; the overrides are for every one. What the folder has of an earlier start counts.
    """

    def __init__(
        self, config: Path, runs: Sequence[PlannedRun], overrides: Sequence[str], folder: Path, pass_bar: PassBar | None
    ) -> None:
        self.config, self.runs, self.overrides, self.folder, self.pass_bar = config, runs, overrides, folder, pass_bar
        self._in_columns = len({run.arm.estimator for run in runs}) > 1
        self._lock = threading.Lock()
        self._finished: dict[str, tuple[Run, Summary]] = {}
        self._drawn: set[str] = set()
        done = seconds_of_runs(folder)
        for run in (run for run in runs if run.name in done):
            self._read(run, done[run.name])

    def _read(self, run: PlannedRun, seconds: float) -> None:
        (found,) = read_runs([self.folder / run.name])
        chosen = [*self.overrides, *run.overrides]
        precision, estimator = (preset_of(group, chosen) for group in ("precision", "estimator"))
        summary = summarise(precision, found.rows, seconds, run.arm.name, estimator, run.seed)
        self._finished[run.name] = replace(found, name=run.name, arm=run.arm.name), summary

    def add(self, run: PlannedRun, seconds: float) -> None:
        """Add a run that has finished: from now on it is not repeated."""
        with self._lock:
            self._read(run, seconds)
            bar, finished = self.pass_bar, self.finished()
            verdicts = {name: bar.verdict(found.rows) for name, found in finished.items()} if bar else None
            about = {"command": sys.argv, "versions": installed_versions(), "pass_bar": verdicts}
            (self.folder / UNDRAWN).touch()  # first: a start that is killed before it draws has not finished
            write_summary(self.folder / SUMMARY, self.summaries(), **about)

    def finished(self) -> dict[str, Run]:
        """Return the finished runs in the order of the plan."""
        return {run.name: self._finished[run.name][0] for run in self.runs if run.name in self._finished}

    def summaries(self) -> list[Summary]:
        """Return a summary of each finished run in the order of the plan."""
        return [self._finished[run.name][1] for run in self.runs if run.name in self._finished]

    def draw(self) -> None:
        """Write figure and report of the runs that there are, unless that has been done."""
        with self._lock:
            finished = self.finished()
        if self._drawn == finished.keys():
            return
        self._drawn, runs = set(finished), list(finished.values())
        precisions = {run.arm.precision for run in self.runs}
        panels = (*COMPARED, "phantom") if None in precisions else COMPARED  # which an arm of the recipe may change
        write_png(self.folder / FIGURE, draw_comparison(*self.in_columns(runs), panels), self.config.stem)
        write_page(self.folder / REPORT, page(runs, self._expected(runs)), force=True)
        with self._lock:
            if self.finished().keys() == finished.keys():
                (self.folder / UNDRAWN).unlink(missing_ok=True)

    def in_columns(self, runs: list[Run]) -> tuple[list[Run], list[Run]]:
        """Return the runs that the figure shows, and the expected curves.

        In a comparison of several estimators, each has a column, in which the precisions are the curves.
        """
        if not self._in_columns:
            return runs, self._expected(runs)
        arms = {run.name: run.arm for run in self.runs}
        placed, expected = [], []
        for column in dict.fromkeys(arms[run.name].estimator or "" for run in runs):
            own = [run for run in runs if arms[run.name].estimator == column]
            placed += [replace(run, arm=arms[run.name].precision or "", column=column) for run in own]
            expected += [replace(curve, column=column) for curve in self._expected(own)]
        return placed, expected

    def _expected(self, runs: Sequence[Run]) -> list[Run]:
        """Return the curves that belong to all of these runs."""
        of_arms = {run.arm: run.name for run in runs}
        found = [expected_of(self.config, self.folder / name) for name in of_arms.values()]
        return found[0] if all(curves == found[0] for curves in found) else []
