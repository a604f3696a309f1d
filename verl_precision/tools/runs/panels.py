"""Which metrics are shown, under which titles and in which colours: of the page and of the figures alike."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from verl_precision.base.files import table_of
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

    @property
    def curve(self) -> str:
        """Return the name of its first curve."""
        return self.curve_of(next(iter(self.metrics)))

    def curve_of(self, label: str) -> str:
        """Return the name of one curve among those of all panels."""
        return f"{self.name}/{label}"

    def title_of(self, label: str) -> str:
        """Return the title of one curve, without the plot."""
        return self.title if len(self.metrics) == 1 else f"{self.title}: {label}"


PANELS = tuple(Panel(**known) for known in table_of(__file__))
REWARD = PANELS[0]


def mean(values: Iterable[float]) -> float:
    """Return a mean, which may be infinite or NaN: of infinities and of the largest numbers `fmean` is an error."""
    found = list(values)
    return sum(found) / len(found)


def colours_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the colour of each curve, for a precision that of every figure; of many curves, colours come again."""
    curves = list(dict.fromkeys(run.curve for run in runs))
    known = {name: PRECISIONS[name] for name in curves if name in PRECISIONS}
    others = cycle([colour for colour in COLOURS if colour not in known.values()])
    return {name: known.get(name) or next(others) for name in curves}
