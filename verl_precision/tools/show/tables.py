"""Tables on the terminal and in Markdown, JSON files, and numbers for readers."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_precision.base.files import write_file
from verl_precision.base.terminal import terminal_table as terminal_table

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]


def markdown_page(title: str, about: str, versions: Mapping[str, str], lines: Iterable[str]) -> str:
    """Return a page in Markdown: its title, what was measured, the versions, then the lines."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([f"# {title}", "", about, f"{packages}.", "", *lines]) + "\n"


def write_json(path: Path, content: Mapping[str, Any], replace: bool = True) -> None:
    """Write indented JSON; a file that exists is replaced, or without `replace` refused."""
    write_file(path, json.dumps(content, indent=2) + "\n", replace=replace)


def finite(value: float) -> float | None:
    """Return a number that JSON can represent: None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def percent_text(share: float, digits: int = 0) -> str:
    """Return a share in percent; a share that rounds to zero has no sign."""
    return f"{round(share, digits + 2) + 0.0:.{digits}%}"


def short_text(value: float) -> str:
    """Return a number with two digits, e.g. 7.2e-04; zero as 0."""
    return f"{value:.1e}" if value else "0"


def number_text(value: float) -> str:
    """Return a number for readers: 6.3·10⁻⁷, 65536, 0.25, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    mantissa, _, exponent = f"{value:.{6 if abs(value) >= 1e4 else 4}g}".partition("e")
    if not exponent:
        return mantissa
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    return power if mantissa == "1" else f"{mantissa}·{power}"
