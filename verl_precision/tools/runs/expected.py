"""The curves of the paper's figures: `expected.csv` beside a recipe, drawn beside a run of it."""

import csv
from pathlib import Path

import yaml

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.runs.compare.summary import REWARD
from verl_precision.tools.runs.read import Run

COLUMNS = ("precision", "estimator", "step", "reward")
FILE = "expected.csv"


def read_expected(path: Path, estimator: str) -> list[Run]:
    """Return the reward curves of an estimator, one for each precision.

    Args:
        path: A file with the columns above, and lines with `#`, which say where the numbers come from.
        estimator: Name of an estimator preset.

    Raises:
        ConfigurationError: If there is no such file, it is not such a file, or it has nothing of the estimator.
    """
    found: dict[str, list[dict[str, float]]] = {}
    known = set()
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            known.add(row["estimator"])
            if row["estimator"] == estimator:
                point = {"step": float(row["step"]), REWARD: float(row["reward"])}
                found.setdefault(row["precision"], []).append(point)
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"it cannot be read ({error!r})",
            setting="--expected",
            value=str(path),
            allowed=f"a CSV file with the columns {', '.join(COLUMNS)}, such as recipes/sanity/{FILE}",
        ) from error
    if not found:
        problem, allowed = f"{path} has no curve of it", ", ".join(sorted(known)) or "none"
        raise ConfigurationError(problem, setting="--estimator", value=estimator, allowed=allowed)
    return [Run(f"paper: {precision}", path, rows) for precision, rows in found.items()]


def expected_of(recipe: Path, folder: Path) -> list[Run]:
    """Return the curves that belong to a run, nothing where the recipe has none for it.

    A run on a CPU has a tiny model, of which the paper says nothing.

    Args:
        recipe: The recipe's YAML.
        folder: Folder of a run of it, with what Hydra has written about its choices.
    """
    path = recipe.parent / FILE
    if not path.is_file():
        return []
    choices = yaml.safe_load((folder / "hydra" / ".hydra" / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
    lines = path.read_text(encoding="utf-8").splitlines()
    if choices["scale"].startswith("cpu") or not any(f",{choices['estimator']}," in line for line in lines):
        return []
    return read_expected(path, choices["estimator"])
