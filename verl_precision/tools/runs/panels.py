"""Which metrics are shown, under which titles and in which colours: of the page and of the figures alike."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.mismatch import metric_names as keys
from verl_precision.tools.runs.read import Run
from verl_precision.tools.show.colours import COLOURS, PRECISIONS


class Panel(NamedTuple):
    """One plot."""

    name: str  # its id on the page
    title: str
    unit: str  # label of the vertical axis
    metrics: Mapping[str, str]  # up to four by their label; of `a or b` the first is shown that a run has
    log: int = 0  # base of a logarithmic axis, on which only positive values are drawn; 0 for a linear axis
    hint: str = ""  # how to read the plot
    # What the horizontal axis counts; "layer" for a metric that ends in `_*`: the mean over all steps of each layer.
    axis: str = "step"

    def title_of(self, label: str) -> str:
        """Return the title of one curve, without the plot."""
        return self.title if len(self.metrics) == 1 else f"{self.title}: {label}"


_PANELS = table_of(__file__, "panels.yaml")
PANELS = tuple(Panel(**known) for known in _PANELS)
REWARD = PANELS[0]


def layer_of(name: str, metric: str) -> int | None:
    """Return the layer of which `metric`, which ends in `_*`, has this name; None where the name is another one's."""
    begin, _, layer = name.rpartition("_")
    return int(layer) if f"{begin}_*" == metric and re.fullmatch("[0-9]{1,9}", layer) else None


def mean(values: Iterable[float]) -> float:
    """Return a mean, which may be infinite or NaN: of infinities and of the largest numbers `fmean` is an error."""
    found = list(values)
    return sum(found) / len(found)


def points_of(run: Run, metric: str) -> dict[int, float]:
    """Return a metric of a run by step, or by layer; where it was not measured there is no point, NaN stays."""
    if metric.endswith("_*"):
        names = sorted({name for row in run.rows for name in row if layer_of(name, metric) is not None})
        return {int(name.rpartition("_")[2]): mean(row[name] for row in run.rows if name in row) for name in names}
    for key in metric.split(" or "):
        found = {int(row["step"]): value for row in run.rows if (value := keys.value_of(row, key)) is not None}
        if found:
            # shown as its distance from 1
            return {step: 1 - value for step, value in found.items()} if key == keys.PROBS_PEARSON else found
    return {}


def parts_of(runs: Sequence[Run], multiple_of: int = 1) -> list[list[Run]]:
    """Return the runs, in order, in parts with no more curves than there are colours.

    So many curves as `multiple_of`, such as the precisions of an estimator, stay together.
    """
    curves = list(dict.fromkeys(run.curve for run in runs))
    length = max(1, len(COLOURS) // multiple_of * multiple_of)
    parts = [set(curves[start : start + length]) for start in range(0, len(curves), length)]
    return [[run for run in runs if run.curve in part] for part in parts]


def colours_of(runs: Sequence[Run], again: bool = False) -> dict[str, str]:
    """Return the colour of each curve, for a precision that of every figure.

    More curves than colours are refused, unless colours may come `again`.
    """
    curves = list(dict.fromkeys(run.curve for run in runs))
    if len(curves) > len(COLOURS) and not again:
        allowed = f"allowed are up to {len(COLOURS)} in one figure. Make several reports."
        raise ConfigurationError(f"{len(curves)} runs: {allowed}")
    known = {name: PRECISIONS[name] for name in curves if name in PRECISIONS}
    others = cycle([colour for colour in COLOURS if colour not in known.values()])
    return {name: known.get(name) or next(others) for name in curves}
