"""Every recipe, found on disk, and the combinations in which the tests try them."""

import itertools
import os

from composer import ROOT

from verl_precision.presets import preset_names

RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "launch")
# Their task is a tiny model's: nothing of it belongs on a GPU.
CPU_ONLY = ("quickstart", "sanity_arithmetic", "phantom_clipping", "collapse")
PAPER = [path for path in RECIPES if path.stem not in CPU_ONLY]
AXES = (RECIPES, *(preset_names(group) for group in ("precision", "estimator", "scale")))


def pairwise(*axes) -> list[tuple]:
    """Return combinations in which every value of an axis meets every value of every other axis; always the same."""
    missing = {pair for row in itertools.product(*axes) for pair in itertools.combinations(enumerate(row), 2)}
    chosen = []
    for wanted in range(len(axes) * (len(axes) - 1) // 2, 0, -1):  # first the rows that meet the most new pairs
        for row in itertools.product(*axes):
            new = missing.intersection(itertools.combinations(enumerate(row), 2))
            if len(new) >= wanted:
                chosen.append(row)
                missing -= new
    return chosen


# `make test` tries each pair; `make test-matrix` sets the variable and tries everything, which takes an hour.
COMBINATIONS = list(itertools.product(*AXES)) if os.environ.get("ALL_COMBINATIONS") else pairwise(*AXES)
# Of these verl is asked what it would do: in `make test` once for each recipe at each scale.
ASKED = (
    COMBINATIONS
    if os.environ.get("ALL_COMBINATIONS")
    else list({(row[0], row[3]): row for row in COMBINATIONS}.values())
)
