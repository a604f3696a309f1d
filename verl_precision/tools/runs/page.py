"""One page about runs: as a file with everything in it (`report`), or from a server that it asks for news (`watch`).

The script draws the same curves in both; it loads nothing, and the policy of the page forbids it to.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.tools.runs.contents import csv_of, curves_of, panels_content
from verl_precision.tools.runs.live import LiveRun, content_of
from verl_precision.tools.runs.panels import PANELS
from verl_precision.tools.runs.read import Run
from verl_precision.tools.show.pages import mark_of, render

# By this line an earlier report is known, which may be written over.
MARK = mark_of("report")
SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def page(runs: list[Run], expected: Sequence[Run] = ()) -> str:
    """Return the report about runs with different names; those of one arm are one curve in the figures.

    The alarm runs over the recorded metrics. Expected curves are drawn beside the reward. Runs without any of the
    metrics shown are refused.
    """
    shown = [LiveRun(number, run.path, None, expected) for number, run in enumerate(runs)]
    for each, run in zip(shown, runs, strict=True):
        each.take(run)
        each.look(None)
    points = {each.run.name: each.points for each in shown}
    if not any(points.values()):
        problem, value = "none of the metrics of the report is there", ", ".join(str(run.path) for run in runs)
        allowed = "metrics of a verl training run (critic/score/mean, mismatch/k3_kl, ...)"
        remedy = "Name the run's own metrics file."
        raise ConfigurationError(problem, setting="RUN", value=value, allowed=allowed, remedy=remedy)
    of_curve = {run.curve: [points[each.name] for each in runs if each.curve == run.curve] for run in runs}
    state = content_of(1, shown, {name: curves_of(own) for name, own in of_curve.items()}, expected)
    return _page("report", state, {panel.name: csv_of(panel, points) for panel in PANELS})


def live_page() -> str:
    """Return the page that asks its server for everything."""
    return _page("watch", None, {})


def _page(verb: str, state: Mapping[str, Any] | None, tables: Mapping[str, str]) -> str:
    content = {"panels": panels_content(), "baseline": AlarmSettings().baseline_steps, "state": state, "csv": tables}
    data = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    names = [run["name"] for run in state["runs"]] if state else ["live"]
    # No text of a run can end the block that it stands in.
    escaped = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    about = {"names": names, "policy": POLICY, "live": state is None}
    return render("runs/page.html", verb, script=Markup(SCRIPT), data=Markup(escaped), **about)


def write_page(path: Path, content: str, force: bool = False) -> None:
    """Write the report; refuse to replace a file, unless by `force`, that is not an earlier report."""
    if not path.absolute().parent.is_dir():
        problem, allowed = f"{path.parent} is not a folder", "a file in a folder that exists"
        remedy = "Make the folder first."
    elif path.exists() and not force and not (path.is_file() and MARK.encode() in path.read_bytes()[:2000]):
        problem, allowed = "it exists and is not an earlier report", "a new file or an earlier report"
        remedy = "Name another file, or add --force."
    else:
        write_file(path, content, replace=True)
        return
    problem += "; nothing was written"
    raise ConfigurationError(problem, setting="--output", value=str(path), allowed=allowed, remedy=remedy)
