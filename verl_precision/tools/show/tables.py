"""Tables on the terminal and in Markdown, JSON files, and numbers for readers."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_precision.base.files import write_file
from verl_precision.base.terminal import terminal_table as terminal_table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]


def markdown_page(module: str, versions: Mapping[str, str], **values: Any) -> str:
    """Return the page of the template `<module>.txt` beside a module, given its `__file__`, with these values."""
    from jinja2 import Template

    template = Template(Path(module).with_suffix(".txt").read_text(encoding="utf-8"), keep_trailing_newline=True)
    return template.render(versions=", ".join(f"{name} {version}" for name, version in versions.items()), **values)


def write_json(path: Path, content: Mapping[str, Any], replace: bool = True) -> None:
    """Write indented JSON; a file that exists is replaced, or without `replace` refused."""
    write_file(path, json.dumps(content, indent=2) + "\n", replace=replace)


def finite(value: float) -> float | None:
    """Return a number that JSON can represent: None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def percent_text(share: float, digits: int = 0) -> str:
    """Return a share in percent; a share that rounds to zero has no sign."""
    return f"{round(share, digits + 2) + 0.0:.{digits}%}"


def number_text(value: float) -> str:
    """Return a number of three digits for readers, whole from 1000 to a million: 6.3e-07, 65536, 0.25, NaN."""
    text = f"{value:.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("nan", "NaN").replace("inf", "∞")
