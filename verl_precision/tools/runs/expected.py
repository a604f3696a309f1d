"""The curves of the paper's figures, `expected.csv` beside a recipe, which are drawn beside a run of it."""

import csv
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import open_regular
from verl_precision.base.state import plain_yaml
from verl_precision.tools.runs.read import REWARD, Rows, Run, step_of

EXPECTED = "expected.csv"
_MOST = 2**24  # bytes of a file beside a run


def read_expected(path: Path, estimator: str) -> list[Run]:
    """Return the reward curves of an estimator, one for each precision; refuse a file that cannot be read or has none.

    The file has the columns precision, estimator, step and reward, and lines with `#`, which say where they come from.
    """
    curves = _expected_curves(path)
    if estimator not in curves:
        problem, allowed = f"{path} has no curve of it", ", ".join(sorted(curves)) or "none"
        raise ConfigurationError(problem, setting="--estimator", value=estimator, allowed=allowed)
    return curves[estimator]


def _expected_curves(path: Path) -> dict[str, list[Run]]:
    """Return the curves of each estimator."""
    found: dict[str, dict[str, Rows]] = {}
    with open_regular(path, most=_MOST) as file:
        lines = [line for line in file.read().decode().splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            rows = found.setdefault(str(row["estimator"]), {}).setdefault(str(row["precision"]), [])
            rows.append({"step": step_of(float(row["step"])), REWARD: float(row["reward"])})
    return {
        estimator: [Run(f"paper: {precision}", path, rows) for precision, rows in curves.items()]
        for estimator, curves in found.items()
    }


def expected_of(source: Path) -> list[Run]:
    """Return the curves beside the recipe that Hydra's copy in a run's folder names; none where none is known.

    A run on a CPU has a tiny model, of which the paper says nothing.
    """
    hydra = at(hydra_of(source, "hydra.yaml"), "hydra")
    sources, name = at(hydra, "runtime", "config_sources"), at(hydra, "job", "config_name")
    places = [each for each in sources if at(each, "schema") == "file"] if isinstance(sources, list) else []
    recipes = (Path(str(at(place, "path")), f"{name}.yaml") for place in places)
    recipe = next((recipe for recipe in recipes if recipe.is_file()), None)
    scale, estimator = (at(hydra, "runtime", "choices", group) for group in ("scale", "estimator"))
    if recipe is None or not isinstance(scale, str) or not isinstance(estimator, str) or scale.startswith("cpu"):
        return []
    path = recipe.with_name(EXPECTED)
    return _expected_curves(path).get(estimator, []) if path.is_file() else []


def at(content: Any, *keys: str) -> Any:
    """Return what stands below some keys, one below the other; None where nothing does."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def hydra_of(source: Path, name: str) -> Any:
    """Return what Hydra has written about a run beside its metrics; None where it has not."""
    folder = source if source.is_dir() else source.parent
    for path in (folder / "hydra" / ".hydra" / name, folder / ".hydra" / name):
        if path.is_file():
            with open_regular(path, most=_MOST) as file:
                return plain_yaml(file.read().decode())
    return None
