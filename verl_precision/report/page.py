"""The report: one HTML file with curves, alarms and table; it loads nothing, and works without a network."""

import json
import math
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from verl_precision import __version__
from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm
from verl_precision.mismatch.alarm_settings import AlarmSettings
from verl_precision.report.figures import draw, number_text
from verl_precision.report.panels import PANELS, Curve, Panel, points_of
from verl_precision.report.read import Run

# By this line an earlier report is known, which may be written over.
MARK = '<meta name="generator" content="verl-precision report">'


def alarms_of(run: Run, settings: AlarmSettings) -> tuple[list[Alarm], int]:
    """Return the alarms that the run's metrics raise, step by step, and what its baseline lacks, steps."""
    alarm = MismatchAlarm(settings)
    raised = [found for row in run.rows for found in alarm.update(int(row["step"]), row)]
    return raised, alarm.baseline_missing


def page(runs: list[Run], settings: AlarmSettings | None = None) -> str:
    """Return the report.

    Args:
        runs: with different names.
        settings: of the alarm, which is run over the recorded metrics.

    Raises:
        ConfigurationError: if no run has any of the metrics shown, or there are too many runs.
        EnvironmentMismatchError: without matplotlib.
    """
    settings = settings or AlarmSettings()
    found = {run.name: alarms_of(run, settings) for run in runs}
    alarms = {name: raised for name, (raised, _) in found.items()}
    shown = [panel for panel in PANELS if _measured(panel, runs)]
    if not shown:
        raise ConfigurationError(
            f"{', '.join(str(run.path) for run in runs)}: none of the metrics of the report is there. Allowed: metrics "
            "of a verl training run (critic/score/mean, mismatch/k3_kl, ...). Name the run's own metrics file."
        )
    figures = {panel: draw(panel, runs, alarms) for panel in shown}
    data = {
        "runs": [run.name for run in runs],
        "panels": {
            panel.name: {"box": figure.box, "range": figure.steps, "curves": list(_data(panel, runs))}
            for panel, figure in figures.items()
        },
    }
    plots = "\n".join(
        f'<figure id="{panel.name}"><figcaption>{escape(panel.title)}{_hint(panel)}</figcaption>{figure.svg}'
        f"{_styles(panel, runs)}</figure>"
        for panel, figure in figures.items()
    )
    template = Template((files("verl_precision.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        mark=MARK,
        title=escape("verl-precision: " + ", ".join(run.name for run in runs)),
        legend="".join(_legend(number, run) for number, run in enumerate(runs)),
        alarms="".join(_alarms(number, run, *found[run.name], settings) for number, run in enumerate(runs)),
        plots=plots,
        missing="".join(f"<li>{escape(text)}</li>" for text in _missing(runs)),
        table="".join(_table(runs)),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        version=__version__,
    )


def write_page(path: Path, content: str, force: bool = False) -> None:
    """Write the report.

    Raises:
        ConfigurationError: if the file is there and is not an earlier report, unless `force`; or its folder is not.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--output {path}: {path.parent} is not a folder; nothing was written. Allowed: a file in a folder that "
            "exists. Make the folder first."
        )
    if path.exists() and not force:
        earlier = path.is_file() and MARK.encode() in path.read_bytes()[:2000]
        if not earlier:
            raise ConfigurationError(
                f"--output {path}: it exists and is not an earlier report; nothing was written. Allowed: a new file or "
                "an earlier report. Name another file, or add --force."
            )
    path.write_text(content, encoding="utf-8")


def _measured(panel: Panel, runs: list[Run]) -> bool:
    return any(points_of(run, curve) for run in runs for curve in panel.curves)


def _hint(panel: Panel) -> str:
    return f" <small>{escape(panel.hint)}</small>" if panel.hint else ""


def _styles(panel: Panel, runs: list[Run]) -> str:
    """Say which line style is which curve, where there is more than one."""
    if len(panel.curves) == 1:
        return ""
    dashes = ("none", "5 3", "1.5 3", "6 3 1.5 3")
    named = "".join(
        f'<span><svg class="key" viewBox="0 0 26 6"><line x1="1" x2="25" y1="3" y2="3" stroke-dasharray="{dash}"/>'
        f"</svg>{escape(curve.label)}</span>"
        for curve, dash in zip(panel.curves, dashes, strict=False)
        if any(points_of(run, curve) for run in runs)
    )
    return f'<p class="styles">{named}</p>'


def _data(panel: Panel, runs: list[Run]) -> Iterator[dict[str, object]]:
    """Yield what the pointer shows; numbers that JSON has not are words."""
    for number, run in enumerate(runs):
        for curve in panel.curves:
            points = points_of(run, curve)
            if points:
                label = curve.label if len(panel.curves) > 1 else ""
                yield {"run": number, "label": label, "points": [(step, number_text(value)) for step, value in points]}


def _chip(number: int) -> str:
    return f'<i class="chip" style="background:var(--run-{number})"></i>'


def _legend(number: int, run: Run) -> str:
    first, last = int(run.rows[0]["step"]), int(run.rows[-1]["step"])
    notes = "".join(f"<br><em>{escape(note)}</em>" for note in run.notes)
    return (
        f"<li>{_chip(number)}<b>{escape(run.name)}</b> <small>steps {first} to {last} · {escape(str(run.path))}{notes}"
        "</small></li>"
    )


def _alarms(number: int, run: Run, alarms: list[Alarm], missing: int, settings: AlarmSettings) -> str:
    length = settings.baseline_steps
    short = f" growth was not looked for: mismatch measured in {length - missing} steps, the baseline takes {length}"
    verdict = "" if alarms else '<span class="ok">no alarm</span>'
    note = f"<small>{short}</small>" if missing else ""
    state = f'<p class="wide">{_chip(number)}<b>{escape(run.name)}</b> {verdict}{note}</p>' if verdict or note else ""
    return state + _alarm_cards(number, run, alarms)


def _alarm_cards(number: int, run: Run, alarms: list[Alarm]) -> str:
    return "".join(
        f"<details open><summary>{_chip(number)}<b>{escape(run.name)}</b> "
        f'<span class="alarm">{escape(alarm.name)}</span>'
        f" at step {alarm.step}, since step {alarm.since_step}</summary>"
        f"<p><code>{escape(alarm.metric)}</code> = {number_text(alarm.seen)}; {escape(alarm.normal)}</p>"
        f"<p>{escape(alarm.meaning)}</p><p>Try, strongest first:</p>"
        f"<ol>{''.join(f'<li>{escape(fix)}</li>' for fix in alarm.try_first)}</ol></details>"
        for alarm in alarms
    )


def _curves() -> Iterator[tuple[str, Curve, Panel]]:
    for panel in PANELS:
        for curve in panel.curves:
            yield (panel.title if len(panel.curves) == 1 else f"{panel.title}: {curve.label}"), curve, panel


def _missing(runs: list[Run]) -> Iterator[str]:
    for title, curve, _ in _curves():
        without = [run.name for run in runs if not points_of(run, curve)]
        if without:
            who = "no run" if len(without) == len(runs) else f"not {', '.join(without)}"
            yield f"{title} ({' or '.join(curve.keys)}): {who}"


def _table(runs: list[Run]) -> Iterator[str]:
    for title, curve, panel in _curves():
        measured = [(number, run, points) for number, run in enumerate(runs) if (points := points_of(run, curve))]
        for position, (number, run, points) in enumerate(measured):
            values = [value for _, value in points]
            numbers = [value for value in values if not math.isnan(value)] or [math.nan]
            span = f'<th scope="rowgroup" rowspan="{len(measured)}">'
            head = f"{span}{escape(title)}<small>{escape(panel.unit)}</small></th>" if position == 0 else ""
            cells = "".join(
                f"<td>{number_text(value)}</td>" for value in (values[0], values[-1], min(numbers), max(numbers))
            )
            yield f"<tr>{head}<td>{_chip(number)}{escape(run.name)}</td>{cells}<td>{len(values)}</td></tr>\n"
