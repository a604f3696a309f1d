"""The runs of a comparison: its arms, each of which is a few Hydra overrides, and each arm once for every seed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.presets import preset_names

ALL = "all"
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*")  # it names a folder


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str  # name in folders, table and figures
    overrides: tuple[str, ...]  # Hydra overrides that make the arm
    precision: str | None = None  # the precision preset that -p chose; None for an arm of the recipe
    estimator: str | None = None  # the estimator preset that -e chose, if any


@dataclass(frozen=True)
class PlannedRun:
    """An arm, with a seed where seeds are given."""

    arm: Arm
    seed: int | None = None

    @property
    def name(self) -> str:
        """Return its name, which is its folder's path below that of the comparison."""
        return run_name(self.arm.name, self.seed)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return what makes this run another one than the others."""
        return self.arm.overrides if self.seed is None else (*self.arm.overrides, f"seed={self.seed}")


def run_name(arm: str, seed: int | None) -> str:
    """Return the name of an arm's run."""
    return arm if seed is None else f"{arm}/seed_{seed}"


def arm_names(precisions: Sequence[str], estimators: Sequence[str] = (), arms: Sequence[str] = ()) -> list[str]:
    """Return the names of the arms: the recipe's own, or every estimator with every precision, or the precisions."""
    if arms:
        return list(arms)
    return [f"{estimator}-{precision}" for estimator, precision in product(estimators, precisions)] or list(precisions)


def preset_arms(precisions: Sequence[str], estimators: Sequence[str] = ()) -> list[Arm]:
    """Return an arm for each precision, or for each estimator with each precision.

    Raises:
        ConfigurationError: If there is no such preset, or one is given twice.
    """
    for option, chosen in (("precision", precisions), ("estimator", estimators)):
        known = preset_names(option)
        if unknown := [name for name in chosen if name not in known]:
            raise ConfigurationError(
                "there is no such preset", setting=f"--{option}", value=unknown[0], allowed=", ".join(known)
            )
        _refuse_twice(option, chosen, "each preset once")
    pairs = product(estimators or (None,), precisions)
    arms = []
    for name, (estimator, precision) in zip(arm_names(precisions, estimators), pairs, strict=True):
        overrides = (f"estimator={estimator}", f"precision={precision}")
        arms.append(Arm(name, overrides if estimator else overrides[1:], precision, estimator))
    return arms


def recipe_arms(recipe: Path, names: Sequence[str]) -> list[Arm]:
    """Return arms of a recipe: its YAML's own top-level `arms: {name: [override, ...], ...}`.

    Args:
        recipe: The recipe's YAML.
        names: Names of its arms, or `all`.

    Raises:
        ConfigurationError: If the recipe has no arms, has none of a name, or has one that cannot be run.
    """
    known = _own_keys(recipe).get("arms")
    if not isinstance(known, dict) or not known:
        raise ConfigurationError(
            f"{recipe} has no arms",
            setting="--arm",
            value=names[0],
            allowed="the names in a recipe's `arms: {name: [override, ...], ...}`",
            remedy="Add that key to the recipe, or compare precisions with -p and estimators with -e.",
        )
    for name, overrides in known.items():
        if not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name == ALL:
            raise ConfigurationError(
                f"an arm of {recipe} has a name that no folder can have, or that means every arm",
                setting="arms",
                value=name,
                allowed="letters, digits and _ . = + -, with a letter or digit first, but not `all`",
            )
        if not isinstance(overrides, list) or not all(map(_is_override, overrides)):
            raise ConfigurationError(
                f"{recipe}: an arm is a list of Hydra overrides",
                setting=f"arms.{name}",
                value=overrides,
                allowed='e.g. [precision=fp16, estimator=grpo], or [] for the recipe as it is; quote one with " #{[,"',
            )
    _refuse_twice("arm", names, "each arm once")
    if unknown := [name for name in names if name not in (ALL, *known)]:
        raise ConfigurationError(
            f"{recipe} has no such arm", setting="--arm", value=unknown[0], allowed=", ".join([ALL, *known])
        )
    if ALL in names and len(names) > 1:
        raise ConfigurationError(
            f"`{ALL}` means every arm", setting="--arm", value=" ".join(names), allowed=f"`{ALL}` alone, or names"
        )
    return [Arm(name, tuple(known[name])) for name in (known if ALL in names else names)]


def with_seeds(arms: Iterable[Arm], seeds: Sequence[int] = ()) -> list[PlannedRun]:
    """Return every arm with every seed, arm by arm; without seeds, every arm once."""
    return [PlannedRun(arm, seed) for arm, seed in product(arms, seeds or (None,))]


def check_seeds(recipe: Path, seeds: Sequence[int]) -> None:
    """Refuse seeds that the recipe cannot take.

    Raises:
        ConfigurationError: If neither the recipe nor one that it builds on has the top-level key `seed`, or a seed is
            given twice.
    """
    _refuse_twice("seed", seeds, "each seed once")
    if seeds and "seed" not in top_level_keys(recipe):
        raise ConfigurationError(
            f"{recipe} has no top-level key `seed`",
            setting="--seed",
            value=seeds[0],
            allowed="seeds for a recipe with that key",
            remedy="Add `seed: 1` to the recipe, and tie verl's settings to it, e.g. `data: {seed: ${seed}}`.",
        )


def check_overrides(runs: Sequence[PlannedRun], overrides: Sequence[str]) -> None:
    """Refuse overrides for every run that a run sets itself.

    Raises:
        ConfigurationError: If there is one; Hydra would refuse it in the middle of the comparison, or it would be lost.
    """
    of_runs = {_key(override): run for run in runs for override in run.overrides}
    for override in overrides:
        if (run := of_runs.get(_key(override))) is not None:
            key, _, value = override.partition("=")
            raise ConfigurationError(
                f"the run {run.name} has a value of its own for it",
                setting=key,
                value=value,
                allowed="settings in which the runs do not differ",
                remedy="Leave it out, or change the arms (-p, -e, --arm, --seed).",
            )


def preset_of(group: str, overrides: Sequence[str]) -> str | None:
    """Return the preset of a group that overrides choose, or None where that is left to the recipe."""
    chosen = [value for key, _, value in (override.partition("=") for override in overrides) if _key(key) == group]
    return chosen[-1] if chosen else None


def top_level_keys(recipe: Path) -> set[str]:
    """Return the top-level keys of a recipe, and of the recipes in its `defaults` that lie beside it or where it says.

    verl's own config and the presets are not looked at.
    """
    content = _own_keys(recipe)
    folders = [recipe.parent]
    if isinstance(hydra := content.get("hydra"), dict):
        paths = hydra.get("searchpath") or []
        folders += [Path(path.removeprefix("file://")) for path in paths if path.startswith("file://")]
    beside = [folder / f"{name}.yaml" for name in content.get("defaults") or () for folder in folders]
    return {str(key) for key in content}.union(*(top_level_keys(path) for path in beside if path.is_file()))


def _own_keys(recipe: Path) -> Mapping[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(recipe), resolve=False)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{recipe} is not a recipe: its YAML has no keys")
    return {str(key): value for key, value in content.items()}


def _is_override(value: object) -> bool:
    return isinstance(value, str) and ("=" in value or value.startswith("~"))


def _key(override: str) -> str:
    """Return what an override sets, without Hydra's prefixes."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _refuse_twice(option: str, values: Sequence[str] | Sequence[int], allowed: str) -> None:
    if len(set(values)) != len(values):
        given = " ".join(map(str, values))
        raise ConfigurationError("one is given twice", setting=f"--{option}", value=given, allowed=allowed)
