"""The page about runs: as one complete file (`report`), or from a server that the page asks for updates (`watch`).

The script draws the same curves in both. It loads nothing, and the page's content security policy forbids loading.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from verl_precision import __version__
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file
from verl_precision.mismatch.alarm import CAUSES
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.tools.runs.curves import LIMITS, PANELS
from verl_precision.tools.runs.status import NOW

# This line marks a file as a report, which a later report may replace.
MARK = '<meta name="generator" content="verl-precision report">'
_TEMPLATE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def page(state: Mapping[str, Any] | None) -> str:
    """Return the page with this content; without content, a page that asks its server for it."""
    panels = [panel._asdict() for panel in PANELS]
    tables = {"panels": panels, "now": NOW, "limits": LIMITS, "causes": CAUSES}
    content = {**tables, "baseline": AlarmSettings().baseline_steps, "state": state}
    data = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # No text of a run can end the script block that contains it.
    escaped = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    names = [run["name"] for run in state["runs"]] if state else ["live"]
    about = {"names": names, "policy": POLICY, "live": state is None, "mark": Markup(MARK), "version": __version__}
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_TEMPLATE)
    return template.render(script=Markup(SCRIPT), data=Markup(escaped), **about)


def write_page(path: Path, state: Mapping[str, Any], force: bool = False) -> None:
    """Write the report about runs; without `force`, refuse to replace a file that is not an earlier report."""
    if path.exists() and not force and not (path.is_file() and MARK.encode() in path.read_bytes()[:2000]):
        problem = "this file exists and is not an earlier report; nothing was written"
        allowed, remedy = "a new file or an earlier report", "Name another file, or add --force."
        raise ConfigurationError(problem, setting="--output", value=str(path), allowed=allowed, remedy=remedy)
    write_file(path, page(state), replace=True)
