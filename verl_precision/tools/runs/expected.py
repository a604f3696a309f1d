"""The curves of the paper's figures, `expected.csv` beside a recipe, which are drawn beside a run of it."""

import csv
import functools
from pathlib import Path
from typing import Any

import yaml

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.runs.read import REWARD, Rows, Run

EXPECTED, EXPECTED_COLUMNS = "expected.csv", ("precision", "estimator", "step", "reward")


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
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            rows = found.setdefault(row["estimator"], {}).setdefault(row["precision"], [])
            rows.append({"step": float(row["step"]), REWARD: float(row["reward"])})
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        problem = f"it cannot be read ({error!r})"
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
    choices = (hydra_of(folder, "hydra.yaml") or {})["hydra"]["runtime"]["choices"]
    return [] if choices["scale"].startswith("cpu") else _expected_curves(path).get(choices["estimator"], [])


def expected_by_recipe(source: Path) -> list[Run]:
    """Return the expected curves of the recipe that Hydra's copy in a run's folder names; none where none is known."""
    folder = source if source.is_dir() else source.parent
    hydra = (hydra_of(folder, "hydra.yaml") or {}).get("hydra", {})
    places = [
        Path(each["path"]) for each in hydra.get("runtime", {}).get("config_sources", ()) if each["schema"] == "file"
    ]
    known = {"scale", "estimator"} <= hydra.get("runtime", {}).get("choices", {}).keys()
    recipes = [place / f"{hydra['job']['config_name']}.yaml" for place in places]
    found = next((recipe for recipe in recipes if recipe.is_file()), None)
    return expected_of(found, folder) if found is not None and known else []


def hydra_of(folder: Path, name: str) -> dict[str, Any] | None:
    """Return what Hydra has written about a run in its folder; None where it has not."""
    for path in (folder / "hydra" / ".hydra" / name, folder / ".hydra" / name):
        if path.is_file():
            return _yaml(path, path.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=64)
def _yaml(path: Path, _changed: int) -> dict[str, Any] | None:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(path.read_text(), Loader=loader)  # safe, and fast where it can be
    return content if isinstance(content, dict) else None
