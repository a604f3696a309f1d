"""The curves of the report as SVG, for a page with light and dark themes.

matplotlib draws, with colours that stand for the page's CSS variables; text stays text, in the page's font.
"""

import math
import re
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from verl_precision.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.mismatch.alarm import Alarm
from verl_precision.report.panels import Panel, points_of
from verl_precision.report.read import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RUNS = 8
WIDTH, HEIGHT = 5.4, 2.9  # inches; 72 units of the SVG each
STYLES = ("-", "--", ":", "-.")
# Points are marked in short series only.
MARKED = 60
# Colours that are replaced by CSS variables; nothing else has them.
TEXT, GRID = "#010101", "#010102"
RUN = "#0102{:02x}"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Figure:
    """A panel, drawn.

    Attributes:
        svg: the element; its ids begin with the panel's name.
        box: left, right, top, bottom of the axes, in units of the SVG's view box.
        steps: the steps at the left and right end of the axes.
    """

    svg: str
    box: tuple[float, float, float, float]
    steps: tuple[float, float]


def draw(panel: Panel, runs: list[Run], alarms: dict[str, list[Alarm]]) -> Figure:
    """Draw a panel: colour tells runs apart, line style the curves, vertical lines are alarms.

    Args:
        panel: with a point in at least one run.
        runs: up to MAX_RUNS.
        alarms: of each run, by name; a full line is one about this panel's metric, a dotted one about another.

    Raises:
        ConfigurationError: with more runs than colours.
        EnvironmentMismatchError: without matplotlib.
    """
    if len(runs) > MAX_RUNS:
        raise ConfigurationError(f"{len(runs)} runs: allowed are up to {MAX_RUNS} in one report. Make two reports.")
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise EnvironmentMismatchError(
            "the report draws with matplotlib, which is not installed. Remedy: pip install 'matplotlib>=3.8'"
        ) from error

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.name, "font.size": 10}):
        canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        positive = _draw_curves(axes, panel, runs)
        _draw_alarms(axes, panel, runs, alarms)
        _style(axes, panel, positive)
        out = StringIO()
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        extent = axes.get_window_extent()
        unit = 72 / canvas.dpi
        box = (extent.x0 * unit, extent.x1 * unit, HEIGHT * 72 - extent.y1 * unit, HEIGHT * 72 - extent.y0 * unit)
        left, right = axes.get_xlim()
    return Figure(_for_page(out.getvalue(), panel.name), box, (left, right))


def _draw_curves(axes: "Axes", panel: Panel, runs: list[Run]) -> bool:
    """Draw every curve; return whether a logarithmic axis has anything to show."""
    series = [
        (number, style, points)
        for number, run in enumerate(runs)
        for curve, style in zip(panel.curves, STYLES, strict=False)
        if (points := points_of(run, curve))
    ]
    positive = bool(panel.log) and any(value > 0 for _, _, points in series for _, value in points)
    for number, style, points in series:
        drawn = [value if math.isfinite(value) and (value > 0 or not positive) else math.nan for _, value in points]
        marker = "o" if len(points) <= MARKED else ""
        steps = [step for step, _ in points]
        axes.plot(steps, drawn, style, color=RUN.format(number), marker=marker, markersize=2.8, linewidth=1.6)
    return positive


def _draw_alarms(axes: "Axes", panel: Panel, runs: list[Run], alarms: dict[str, list[Alarm]]) -> None:
    own = {name for curve in panel.curves for name in curve.alarms}
    for number, run in enumerate(runs):
        for alarm in alarms.get(run.name, ()):
            style, alpha = ("-", 0.9) if alarm.name in own else (":", 0.55)
            axes.axvline(alarm.step, linestyle=style, alpha=alpha, color=RUN.format(number), linewidth=1.1, zorder=1)
            if alarm.name in own:
                axes.plot(
                    [alarm.step],
                    [1.0],
                    "v",
                    color=RUN.format(number),
                    markersize=7,
                    transform=axes.get_xaxis_transform(),
                    clip_on=False,
                )


def _style(axes: "Axes", panel: Panel, positive: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if positive:
        axes.set_yscale("log", base=panel.log)
        low, high = axes.get_ylim()
        decades = math.log(high / low, panel.log)
        # Powers of the base alone would leave a narrow range with one tick, or none.
        subs = (1.0,) if decades > 2 or panel.log == 2 else (1.0, 2.0, 5.0) if decades > 0.7 else tuple(range(1, 10))
        axes.yaxis.set_major_locator(LogLocator(panel.log, subs=subs, numticks=7))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value, panel.log, low)))
        axes.tick_params(which="minor", left=False)
    elif axes.dataLim.y0 == 0:  # counts and fractions stand on the axis
        axes.set_ylim(0, None if axes.dataLim.y1 > 0 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step", color=TEXT)
    axes.set_ylabel(panel.unit, color=TEXT)
    axes.tick_params(colors=TEXT, length=0)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.yaxis.get_offset_text().set_color(TEXT)


def number_text(value: float, base: int = 10, smallest: float = math.inf) -> str:
    """Return a number as people read it: 6.3·10⁻⁷, 2¹⁶, 0.25.

    Args:
        value: any, NaN and infinite included.
        base: 2 writes powers of 2 as such.
        smallest: on the same axis; below 1e-3 all are written with a power of ten.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if base == 2 and value > 0 and math.log2(value).is_integer():
        return "2" + str(int(math.log2(value))).translate(SUPERSCRIPT)
    if value == 0 or (1e-3 <= min(abs(value), smallest) and abs(value) < 1e6):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPT)
    mantissa = mantissa.rstrip("0").rstrip(".")
    return power if mantissa == "1" else f"{mantissa}·{power}"


def _for_page(svg: str, name: str) -> str:
    """Cut the element out of the document, make its ids its own and its colours the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\1{name}-", svg)
    # Inside HTML the parser knows the namespaces; the page is then free of addresses.
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r"#0102([0-9a-f]{2})", lambda found: f"var(--run-{int(found.group(1), 16)})", svg)
    return svg.replace(TEXT, "var(--muted)").replace(GRID, "var(--grid)")
