"""The runs of a comparison: its arms, each of which is a few Hydra overrides, and each arm once for every seed."""

import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import require_each_once
from verl_precision.check.composition import require_overrides
from verl_precision.presets import preset_names
from verl_precision.tools.checking.composing import read_recipe, require_recipe

ALL = "all"
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*")  # it names a folder


class Arm(NamedTuple):
    """One side of a comparison."""

    name: str  # of its folder, and in table and figures
    overrides: tuple[str, ...]  # Hydra overrides that make the arm
    precision: str | None = None  # the precision preset that -p chose; None for an arm of the recipe
    estimator: str | None = None  # the estimator preset that -e chose, if any


class PlannedRun(NamedTuple):
    """An arm, with a seed where seeds are given."""

    arm: Arm
    seed: int | None
    name: str  # its folder's path below that of the comparison
    overrides: tuple[str, ...]  # what makes this run another one than the others


def run_name(arm: str, seed: int | None) -> str:
    """Return the name of an arm's run."""
    return arm if seed is None else f"{arm}/seed_{seed}"


def preset_arms(precisions: Sequence[str], estimators: Sequence[str] = ()) -> list[Arm]:
    """Return an arm for each precision, or for each estimator with each precision; refuse presets that are unknown."""
    for option, chosen in (("precision", precisions), ("estimator", estimators)):
        known = preset_names(option)
        for name in (each for each in chosen if each not in known):
            problem, allowed = "there is no such preset", ", ".join(known)
            raise ConfigurationError(problem, setting=f"--{option}", value=name, allowed=allowed)
        require_each_once(f"--{option}", chosen, "each preset once")
    arms = []
    for estimator, precision in product(estimators or (None,), precisions):
        overrides = (f"estimator={estimator}", f"precision={precision}")
        name = f"{estimator}-{precision}" if estimator else precision
        arms.append(Arm(name, overrides if estimator else overrides[1:], precision, estimator))
    return arms


def recipe_arms(recipe: Path, names: Sequence[str]) -> list[Arm]:
    """Return the arms with these names, or with `all` every one, of a recipe's own `arms: {name: [override, ...]}`."""
    known = _own_keys(recipe).get("arms")
    if not isinstance(known, dict) or not known:
        problem, allowed = f"{recipe} has no arms", "the names in a recipe's `arms: {name: [override, ...], ...}`"
        remedy = "Add that key to the recipe, or compare precisions with -p and estimators with -e."
        raise ConfigurationError(problem, setting="--arm", value=names[0], allowed=allowed, remedy=remedy)
    for name, overrides in known.items():
        if not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name == ALL:
            problem = f"an arm of {recipe} has a name that no folder can have, or that means every arm"
            allowed = "letters, digits and _ . = + -, with a letter or digit first, but not `all`"
            raise ConfigurationError(problem, setting="arms", value=name, allowed=allowed)
        if not isinstance(overrides, list) or not all(isinstance(o, str) and re.search("^~|=", o) for o in overrides):
            problem = f"{recipe}: an arm is a list of Hydra overrides"
            allowed = 'e.g. [precision=fp16, estimator=grpo], or [] for the recipe as it is; quote one with " #{[,"'
            raise ConfigurationError(problem, setting=f"arms.{name}", value=overrides, allowed=allowed)
    require_each_once("--arm", names, "each arm once")
    for name in (each for each in names if each not in (ALL, *known)):
        problem, allowed = f"{recipe} has no such arm", ", ".join([ALL, *known])
        raise ConfigurationError(problem, setting="--arm", value=name, allowed=allowed)
    if ALL in names and len(names) > 1:
        problem, allowed = f"`{ALL}` means every arm", f"`{ALL}` alone, or names"
        raise ConfigurationError(problem, setting="--arm", value=" ".join(names), allowed=allowed)
    return [Arm(name, tuple(known[name])) for name in (known if ALL in names else names)]


def with_seeds(arms: Iterable[Arm], seeds: Sequence[int] = ()) -> list[PlannedRun]:
    """Return every arm with every seed, arm by arm; without seeds, every arm once."""
    plan = []
    for arm, seed in product(arms, seeds or (None,)):
        own = [] if seed is None else [f"seed={seed}"]
        plan.append(PlannedRun(arm, seed, run_name(arm.name, seed), (*arm.overrides, *own)))
    return plan


def check_arguments(
    config: Path,
    precisions: Sequence[str],
    overrides: Sequence[str],
    estimators: Sequence[str] = (),
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[PlannedRun]:
    """Return the runs of a comparison, or refuse what cannot be compared, before anything starts.

    Precisions and estimators are presets. Arms are names of the recipe's own, in place of both. The overrides are for
    every run, and each arm runs with each seed.
    """
    require_recipe(config)
    if arms and (precisions or estimators):
        problem, value = "an arm of the recipe says itself what differs", " ".join(arms)
        allowed = "--arm, or --precision and --estimator, not both"
        remedy = "Leave -p and -e out, or put them into the recipe's arms."
        raise ConfigurationError(problem, setting="--arm", value=value, allowed=allowed, remedy=remedy)
    runs = with_seeds(recipe_arms(config, arms) if arms else preset_arms(precisions, estimators), seeds)
    require_overrides(overrides)
    require_each_once("--seed", seeds, "each seed once")
    if seeds and "seed" not in top_level_keys(config):
        problem, allowed = f"{config} has no top-level key `seed`", "seeds for a recipe with that key"
        remedy = "Add `seed: 1` to the recipe, and tie verl's settings to it, e.g. `data: {seed: ${seed}}`."
        raise ConfigurationError(problem, setting="--seed", value=seeds[0], allowed=allowed, remedy=remedy)
    of_runs = {_key(override): run for run in runs for override in run.overrides}
    for override in (*overrides, *(own for run in runs for own in run.overrides)):
        key, value = _key(override), override.partition("=")[2]
        if key == "trainer.default_local_dir":
            problem = "the runs would go on from each other's checkpoints"
            allowed = "nothing: each run has its own, <output>/<recipe>/<time>/<run>/checkpoints"
            remedy = "Leave it out, and give --output a folder on the disk that you want."
            raise ConfigurationError(problem, setting=key, value=value, allowed=allowed, remedy=remedy)
    # Hydra would refuse these in the middle of the comparison, or one of the two would be lost.
    for override in (each for each in overrides if _key(each) in of_runs):
        key, _, value = override.partition("=")
        problem = f"the run {of_runs[_key(override)].name} has a value of its own for it"
        allowed = "settings in which the runs do not differ"
        remedy = "Leave it out, or change the arms (-p, -e, --arm, --seed)."
        raise ConfigurationError(problem, setting=key, value=value, allowed=allowed, remedy=remedy)
    return runs


def preset_of(group: str, overrides: Sequence[str]) -> str | None:
    """Return the preset of a group that overrides choose, or None where that is left to the recipe."""
    chosen = [value for key, _, value in (override.partition("=") for override in overrides) if _key(key) == group]
    return chosen[-1] if chosen else None


def top_level_keys(recipe: Path) -> set[str]:
    """Return the top-level keys of a recipe, and of the recipes in its `defaults` that lie beside it or where it says.

    verl's own config and the presets are not looked at.
    """
    content = _own_keys(recipe)
    beside = [folder / f"{name}.yaml" for name in content.get("defaults") or () for folder in recipe_folders(recipe)]
    return set(content).union(*(top_level_keys(path) for path in beside if path.is_file()))


def recipe_folders(recipe: Path) -> list[Path]:
    """Return where the recipes may lie that a recipe builds on: beside it, or where its `hydra.searchpath` says."""
    paths = OmegaConf.select(read_recipe(recipe), "hydra.searchpath") or []
    return [recipe.parent, *(Path(path.removeprefix("file://")) for path in paths if path.startswith("file://"))]


def _own_keys(recipe: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(read_recipe(recipe), resolve=False)
    return {str(key): value for key, value in content.items()}


def _key(override: str) -> str:
    """Return what an override sets, without Hydra's prefixes."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]
