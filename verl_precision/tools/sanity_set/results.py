"""What a run leaves: the rows kept, a summary, and the histogram of accuracies."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from verl_precision.tools.jobs.problems import DataSet
from verl_precision.tools.sanity_set.schedule import Schedule, Verdict
from verl_precision.tools.show.tables import terminal_table

BINS = 10


@dataclass(frozen=True)
class Summary:
    """The result in numbers."""

    rows: int  # of the data set
    duplicates: int  # rows that repeat another; they are sampled and written once
    unreadable: int  # problems left out because their answer cannot be parsed
    overlong: int  # problems left out because their prompt is too long
    kept: int
    too_easy: int  # problems dropped above the window
    too_hard: int  # problems dropped below it
    responses_drawn: int
    responses_saved: int  # responses not drawn, because the verdict was decided
    tokens_drawn: int
    tokens_saved: int  # estimate: responses saved x mean length of that problem's responses
    histogram: list[int]  # problems by accuracy over the responses drawn, in ten bins from 0 to 1


def summarise(data: DataSet, schedule: Schedule, unreadable: int, overlong: int) -> Summary:
    """Return the result of a schedule whose verdicts are all decided."""
    window, tallies = schedule.window, schedule.tallies.values()
    dropped = [tally for name, tally in schedule.tallies.items() if schedule.verdict(name) is Verdict.DROPPED]
    too_easy = sum(tally.correct_count > window.most for tally in dropped)
    begun = [tally for tally in tallies if tally.drawn]  # a window from 0 to 1 keeps all, and none is drawn
    histogram = [0] * BINS
    for tally in begun:
        histogram[min(tally.correct_count * BINS // tally.drawn, BINS - 1)] += 1
    return Summary(
        rows=data.table.num_rows,
        duplicates=data.table.num_rows - len(data.problems),
        unreadable=unreadable,
        overlong=overlong,
        kept=len(tallies) - len(dropped),
        too_easy=too_easy,
        too_hard=len(dropped) - too_easy,
        responses_drawn=schedule.drawn,
        responses_saved=len(tallies) * window.responses - schedule.drawn,
        tokens_drawn=sum(tally.tokens for tally in tallies),
        tokens_saved=round(sum((window.responses - tally.drawn) * tally.tokens / tally.drawn for tally in begun)),
        histogram=histogram,
    )


def table(summary: Summary) -> Table:
    """Return the result as a table for the terminal."""
    responses = summary.responses_drawn + summary.responses_saved
    tokens = max(summary.tokens_drawn + summary.tokens_saved, 1)
    rows = [
        ("kept", str(summary.kept)),
        ("too easy / too hard", f"{summary.too_easy} / {summary.too_hard}"),
        ("responses drawn", f"{summary.responses_drawn} of {responses}"),
        ("saved by deciding early", f"{summary.responses_saved} ({summary.responses_saved / responses:.0%})"),
        ("tokens drawn", f"{summary.tokens_drawn}"),
        ("tokens saved (estimate)", f"{summary.tokens_saved} ({summary.tokens_saved / tokens:.0%})"),
    ]
    for reason, count in (
        ("duplicate rows, taken once", summary.duplicates),
        ("left out: answer cannot be parsed", summary.unreadable),
        ("left out: prompt too long", summary.overlong),
    ):
        rows += [(reason, str(count))] if count else []
    return terminal_table(["sanity set", ""], rows, framed=True)


def content(summary: Summary, schedule: Schedule) -> dict[str, Any]:
    """Return the result for JSON, with every problem's counts and verdict."""
    problems = {
        name: {"correct": tally.correct_count, "drawn": tally.drawn, "verdict": schedule.verdict(name).value}
        for name, tally in schedule.tallies.items()
    }
    return {"summary": asdict(summary), "problems": problems}


def write_figure(path: Path, schedule: Schedule, title: str) -> None:
    """Write the histogram of accuracies as PNG, the window shaded."""
    from verl_precision.tools.show.figures import new_figure, style, write_png

    begun = [tally for tally in schedule.tallies.values() if tally.drawn]
    most = max((tally.drawn for tally in begun), default=0)
    figure = new_figure(5.2, 3.4)
    axis = figure.subplots()
    axis.axvspan(float(schedule.window.low), float(schedule.window.high), alpha=0.15, label="kept")
    axis.hist([tally.correct_count / tally.drawn for tally in begun], bins=2 * BINS, range=(0, 1))
    style(axis, f"accuracy over the responses drawn (up to {most})", "problems")
    axis.legend(frameon=False)
    write_png(path, figure, title)
