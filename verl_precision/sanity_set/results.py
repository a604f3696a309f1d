"""What a run leaves: the rows kept, a summary, and the histogram of accuracies."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from verl_precision.files import new_file, write_file
from verl_precision.sampling.problems import DataSet
from verl_precision.sanity_set.schedule import Schedule
from verl_precision.sanity_set.verdict import Verdict, Window

BINS = 10
BAR_WIDTH = 40  # characters of the longest bar


@dataclass(frozen=True)
class Summary:
    """The result in numbers.

    Attributes:
        rows: Rows of the data set.
        duplicates: Rows that repeat another; they are sampled and written once.
        unreadable: Problems left out because their answer cannot be parsed.
        overlong: Problems left out because their prompt is too long.
        kept: Problems kept.
        too_easy: Problems dropped above the window.
        too_hard: Problems dropped below it.
        responses_drawn: Responses drawn in all.
        responses_saved: Responses not drawn, because the verdict was decided.
        tokens_drawn: Tokens of the responses drawn.
        tokens_saved: Estimate: responses saved x mean length of that problem's responses.
        histogram: Problems by accuracy over the responses drawn, in ten bins from 0 to 1.
    """

    rows: int
    duplicates: int
    unreadable: int
    overlong: int
    kept: int
    too_easy: int
    too_hard: int
    responses_drawn: int
    responses_saved: int
    tokens_drawn: int
    tokens_saved: int
    histogram: list[int]


def summarise(data: DataSet, schedule: Schedule, unreadable: int, overlong: int) -> Summary:
    """Return the result of a schedule whose verdicts are all decided."""
    tallies = schedule.tallies
    dropped = [t for name, t in tallies.items() if schedule.verdict(name) is Verdict.DROPPED]
    too_easy = sum(tally.correct_count > schedule.window.most for tally in dropped)
    left = {name: schedule.window.responses - tally.drawn for name, tally in tallies.items()}
    histogram = [0] * BINS
    for tally in tallies.values():
        histogram[min(tally.correct_count * BINS // tally.drawn, BINS - 1)] += 1
    return Summary(
        rows=data.table.num_rows,
        duplicates=data.duplicates,
        unreadable=unreadable,
        overlong=overlong,
        kept=len(schedule.kept()),
        too_easy=too_easy,
        too_hard=len(dropped) - too_easy,
        responses_drawn=sum(tally.drawn for tally in tallies.values()),
        responses_saved=sum(left.values()),
        tokens_drawn=sum(tally.tokens for tally in tallies.values()),
        tokens_saved=round(sum(left[name] * tally.tokens / tally.drawn for name, tally in tallies.items())),
        histogram=histogram,
    )


def table(summary: Summary) -> Table:
    """Return the result as a table for the terminal."""
    shown = Table("sanity set", "")
    shown.columns[1].justify = "right"
    drawn = summary.responses_drawn + summary.responses_saved
    tokens = summary.tokens_drawn + summary.tokens_saved
    shown.add_row("kept", f"[bold]{summary.kept}[/]")
    shown.add_row("too easy / too hard", f"{summary.too_easy} / {summary.too_hard}")
    shown.add_row("responses drawn", f"{summary.responses_drawn} of {drawn}")
    shown.add_row("saved by deciding early", f"{summary.responses_saved} ({summary.responses_saved / drawn:.0%})")
    shown.add_row("tokens drawn", f"{summary.tokens_drawn}")
    shown.add_row("tokens saved (estimate)", f"{summary.tokens_saved} ({summary.tokens_saved / max(tokens, 1):.0%})")
    for count, what in (
        (summary.duplicates, "duplicate rows, taken once"),
        (summary.unreadable, "left out: answer cannot be parsed"),
        (summary.overlong, "left out: prompt too long"),
    ):
        if count:
            shown.add_row(f"[yellow]{what}[/]", str(count))
    return shown


def histogram_text(histogram: list[int]) -> str:
    """Return the histogram in characters, one line a bin."""
    most = max(histogram, default=0) or 1
    lines = []
    for index, count in enumerate(histogram):
        bar = "#" * -(-count * BAR_WIDTH // most)
        lines.append(f"{index * 100 // BINS:3d}-{(index + 1) * 100 // BINS:3d}%  {count:6d}  {bar}".rstrip())
    return "\n".join(lines)


def write_summary(path: Path, summary: Summary, schedule: Schedule, settings: Mapping[str, Any]) -> None:
    """Write summary, settings, and every problem's counts and verdict as JSON."""
    problems = {
        name: {"correct": tally.correct_count, "drawn": tally.drawn, "verdict": schedule.verdict(name).value}
        for name, tally in schedule.tallies.items()
    }
    content = {"summary": asdict(summary), "settings": settings, "problems": problems}
    write_file(path, json.dumps(content, indent=1) + "\n", replace=True)


def write_figure(path: Path, schedule: Schedule, title: str) -> None:
    """Write the histogram of accuracies as PNG, the window shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    window: Window = schedule.window
    accuracies = [tally.accuracy for tally in schedule.tallies.values()]
    figure, axis = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    axis.axvspan(float(window.low), float(window.high), alpha=0.15, label="kept")
    axis.hist(accuracies, bins=2 * BINS, range=(0, 1))
    most = max((tally.drawn for tally in schedule.tallies.values()), default=0)
    axis.set(xlabel=f"accuracy over the responses drawn (up to {most})", ylabel="problems", title=title)
    axis.legend(frameon=False)
    with new_file(path, replace=True) as scratch:
        figure.savefig(scratch, dpi=150)
    pyplot.close(figure)
