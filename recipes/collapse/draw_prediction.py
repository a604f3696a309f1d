"""The spread that a k3 predicts, beside every spread that the log has: ratios of both, and docs/predicted_spread.png.

    python recipes/collapse/draw_prediction.py
    python recipes/collapse/draw_prediction.py --figure docs/predicted_spread.png

The points are read from docs/log: the doses of this recipe, SmolLM2-135M on a GPU and on a CPU, and training with
1,024 tokens. Lines of the figure are √(2 k3 T) for SmolLM2's k3.
"""

import argparse
import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from verl_precision.mismatch.alarm import FEWEST
from verl_precision.mismatch.prediction import LENGTHS, predicted_spread, weighting_of
from verl_precision.tools.show.colours import COLOURS, PRECISIONS
from verl_precision.tools.show.figures import new_figure, style, write_png
from verl_precision.tools.show.tables import markdown_table

LOG = Path(__file__).resolve().parents[2] / "docs" / "log"
TOKENS_OF_DOSES = 130  # nearly all responses of the recipe have this length
ON_A_GPU = {"bf16": 1.96e-3, "fp16": 3.07e-5}  # k3 of the entry of 2026-11-26
TO_4096_TOKENS = {"bf16": 1.67e-3, "fp16": 2.74e-5}  # k3 of the entry of 2026-11-29, on a CPU


class Point(NamedTuple):
    """A measured spread."""

    source: str
    dtypes: str  # one of both sides, or "rollout, trainer"
    tokens: int
    k3: float
    spread: float  # nats

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.spread / predicted_spread(self.k3, self.tokens)


def points() -> list[Point]:
    """Return every point of the log."""
    text = (LOG / "real_model.md").read_text()
    dose = r"^\| \d+ \| (bf16|fp16) \| 0 \| 60 \| (\S+) \| \S+ \| (\S+) \|"
    rows = re.findall(dose, (LOG / "collapse.md").read_text(), re.M)
    found = [Point("doses", dtype, TOKENS_OF_DOSES, float(k3), float(spread)) for dtype, k3, spread in rows]
    number, spread = r"([\d,]+)", r"(\S+) ± \S+"
    on_a_gpu, longest = text.split("\n## 2026-11-29: to 4,096 tokens\n")
    for entry, source, k3s in (on_a_gpu, "GPU, by length", ON_A_GPU), (longest, "CPU, by length", TO_4096_TOKENS):
        for tokens, *both in re.findall(rf"^\| {number} \| \d+ \| {spread} \|.*? \| \d+ \| {spread} \|", entry, re.M):
            for (dtype, k3), value in zip(k3s.items(), both, strict=True):
                found.append(Point(source, dtype, int(tokens.replace(",", "")), k3, float(value)))
    trained = re.findall(r"^\| (?:k3|spread of a response's log-weight) \| (\S+) \| (\S+) \| (\S+) \|", text, re.M)
    for dtype, k3, value in zip(("bf16", "fp16", "bf16"), *trained, strict=True):
        found.append(Point("GPU, training", dtype, 1024, float(k3), float(value)))
    k3_of: dict[str, float] = {}
    names: list[str] = []
    for line in text.splitlines():  # the tables of `verl-precision mismatch` on a CPU: k3 first, then growth
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if re.match(r"\| \d \| \w+ \| \w+ \|", line):
            k3_of[f"{cells[1]}, {cells[2]}"] = float(cells[3].split()[0])
        names = cells[1:] if cells[0] == "tokens" else names
        if len(cells) > 1 and re.fullmatch(r"\S+ of \d+", cells[1]):
            for name, cell in zip(names, cells[1:], strict=True):
                found.append(Point(_source(name), name, int(cells[0]), k3_of[name], float(cell.split()[0])))
    return found


def _source(name: str) -> str:
    return "CPU, FP32 on both sides" if name == "fp32, fp32" else "CPU, by length"


def table(found: list[Point]) -> str:
    """Return the least, the middle and the largest ratio of each source as Markdown."""
    rows = []
    for source in dict.fromkeys(point.source for point in found):
        ratios = sorted(point.ratio for point in found if point.source == source)
        values = ratios[0], statistics.median(ratios), ratios[-1]
        rows.append([source, str(len(ratios)), *(f"{value:.2f}" for value in values)])
    return "\n".join(markdown_table(["source", "spreads", "least", "median", "largest"], rows))


def draw(found: list[Point], path: Path) -> None:
    """Draw spread against length: measured points of SmolLM2, and the prediction for its k3."""
    figure = new_figure(7.5, 4)
    axes = figure.subplots()
    full, lengths = weighting_of("pg_seq_is"), [2**power for power in range(6, 16)]
    for (dtype, k3), colour in zip(ON_A_GPU.items(), PRECISIONS.values(), strict=True):
        label = f"{dtype.upper()}, k3 {k3:.2g}: "
        longest = max(n for n in range(1, LENGTHS[-1]) if full.share(k3, n) >= FEWEST)
        axes.plot(lengths, [predicted_spread(k3, n) for n in lengths], color=colour, label=f"{label}predicted")
        for marker, source in (("o", "GPU, by length"), ("x", "CPU, by length")):
            own = [each for each in found if each.source == source and each.dtypes in (dtype, f"{dtype}, {dtype}")]
            where = source.partition(",")[0]
            xs, ys = [each.tokens for each in own], [each.spread for each in own]
            axes.plot(xs, ys, marker, color=colour, alpha=0.8, label=f"measured, {where}")
        axes.axvline(longest, color=colour, linestyle=":", linewidth=1)
        axes.annotate(f"{longest:,} tokens", (longest, 0.055), color=colour, rotation=90, ha="right", fontsize=8)
    bound = math.sqrt(-math.log(FEWEST))
    axes.axhline(bound, color=COLOURS[-1], linestyle="--", linewidth=1)
    axes.annotate(f"effective share of pg_seq_is {FEWEST:.0%}", (64, bound * 1.08), color=COLOURS[-1], fontsize=8)
    style(axes, "tokens of a response", "spread of log-weights, nats")
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize=8)
    write_png(path, figure, "SmolLM2-135M: predicted and measured spread")


def main() -> None:
    """Print the ratios and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where the figure goes; without it only the table is printed")
    arguments = parser.parse_args()
    found = points()
    print(table(found))
    if arguments.figure:
        draw(found, arguments.figure)


if __name__ == "__main__":
    main()
