"""The curves of the paper's figures, `expected.csv` beside a recipe, which are drawn beside a run of it."""

import csv
import functools
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import open_regular
from verl_precision.base.state import plain_yaml
from verl_precision.tools.runs.read import REWARD, Rows, Run
from verl_precision.tools.runs.rows import step_of

EXPECTED, EXPECTED_COLUMNS = "expected.csv", ("precision", "estimator", "step", "reward")
_MOST = 2**24  # bytes of a file beside a run


def read_expected(path: Path, estimator: str) -> list[Run]:
    """Return the reward curves of an estimator, one for each precision; refuse a file that cannot be read or has none.

    The file has `EXPECTED_COLUMNS`, and lines with `#`, which say where the numbers come from.
    """
    curves = _expected_curves(path)
    if estimator not in curves:
        problem, allowed = f"{path} has no curve of it", ", ".join(sorted(curves)) or "none"
        raise ConfigurationError(problem, setting="--estimator", value=estimator, allowed=allowed)
    return curves[estimator]


def _expected_curves(path: Path) -> dict[str, list[Run]]:
    """Return the curves of each estimator."""
    found: dict[str, dict[str, Rows]] = {}
    try:
        with open_regular(path, most=_MOST) as file:
            lines = [line for line in file.read().decode().splitlines() if not line.startswith("#")]
            for row in csv.DictReader(lines):
                rows = found.setdefault(str(row["estimator"]), {}).setdefault(str(row["precision"]), [])
                rows.append({"step": step_of(float(row["step"])), REWARD: float(row["reward"])})
    except (OSError, ConfigurationError) as error:
        problem = f"it cannot be read ({(error.__cause__ or error)!r})"
        allowed = f"a CSV file with the columns {', '.join(EXPECTED_COLUMNS)}, such as recipes/sanity/{EXPECTED}"
        raise ConfigurationError(problem, setting="--expected", value=str(path), allowed=allowed) from error
    return {
        estimator: [Run(f"paper: {precision}", path, rows) for precision, rows in curves.items()]
        for estimator, curves in found.items()
    }


def expected_of(recipe: Path, folder: Path) -> list[Run]:
    """Return the curves that belong to a run, by Hydra's files in its folder; none where the recipe has none for it.

    A run on a CPU has a tiny model, of which the paper says nothing.
    """
    path = recipe.parent / EXPECTED
    if not path.is_file():
        return []
    choices = at(hydra_of(folder, "hydra.yaml"), "hydra", "runtime", "choices")
    scale, estimator = at(choices, "scale"), at(choices, "estimator")
    if not isinstance(scale, str) or not isinstance(estimator, str) or scale.startswith("cpu"):
        return []
    return _expected_curves(path).get(estimator, [])


def expected_by_recipe(source: Path) -> list[Run]:
    """Return the expected curves of the recipe that Hydra's copy in a run's folder names; none where none is known."""
    folder = source if source.is_dir() else source.parent
    hydra = at(hydra_of(folder, "hydra.yaml"), "hydra")
    sources, name = at(hydra, "runtime", "config_sources"), at(hydra, "job", "config_name")
    places = [each for each in sources if at(each, "schema") == "file"] if isinstance(sources, list) else []
    recipes = (Path(str(at(place, "path")), f"{name}.yaml") for place in places)
    found = next((recipe for recipe in recipes if recipe.is_file()), None)
    return [] if found is None else expected_of(found, folder)


def at(content: Any, *keys: str) -> Any:
    """Return what stands below some keys, one below the other; None where nothing does."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def hydra_of(folder: Path, name: str) -> Any:
    """Return what Hydra has written about a run in its folder; None where it has not."""
    for path in (folder / "hydra" / ".hydra" / name, folder / ".hydra" / name):
        if path.is_file():
            return _yaml(path, path.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=64)
def _yaml(path: Path, _changed: int) -> Any:
    with open_regular(path, most=_MOST) as file:
        return plain_yaml(file.read().decode())
