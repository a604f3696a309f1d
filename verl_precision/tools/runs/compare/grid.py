"""The runs of a comparison: each arm is a few Hydra overrides, and has one run for every seed."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import require_each_once
from verl_precision.check.keys import require_overrides
from verl_precision.presets import preset_names
from verl_precision.tools.checking.composing import read_recipe, require_recipe

ALL = "all"
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*")  # the name is also that of a folder
Arms = dict[str, tuple[str, ...]]  # name, in folder, table and figures -> Hydra overrides that make the arm


class PlannedRun(NamedTuple):
    """A run of an arm, with a seed if seeds are given."""

    arm: str
    seed: int | None
    overrides: tuple[str, ...]  # the overrides in which runs differ

    @property
    def name(self) -> str:
        """Return the path of the run's folder within the comparison's folder."""
        return self.arm if self.seed is None else f"{self.arm}/seed_{self.seed}"


def preset_arms(precisions: Sequence[str], estimators: Sequence[str] = ()) -> Arms:
    """Return an arm for each precision, or for each estimator with each precision; refuse presets that are unknown."""
    for option, chosen in (("precision", precisions), ("estimator", estimators)):
        _require_known(f"--{option}", chosen, preset_names(option), "there is no preset of this name")
        require_each_once(f"--{option}", chosen, "each preset once")
    if not estimators:
        return {precision: (f"precision={precision}",) for precision in precisions}
    return {f"{e}-{p}": (f"estimator={e}", f"precision={p}") for e, p in product(estimators, precisions)}


def recipe_arms(recipe: Path, names: Sequence[str]) -> Arms:
    """Return the arms with these names (`all`: every arm) of a recipe's own `arms: {name: [override, ...]}`."""
    known: Any = OmegaConf.to_container(read_recipe(recipe), resolve=False).get("arms")
    if not isinstance(known, dict) or not known:
        allowed = "one of the names in a recipe's `arms: {name: [override, ...], ...}`"
        remedy = "Add that key to the recipe, or compare precisions with -p and estimators with -e."
        raise _refused("--arm", names[0], f"{recipe} has no arms", allowed, remedy)
    for name, overrides in known.items():
        is_list = isinstance(overrides, list) and all(isinstance(o, str) and re.search("^~|=", o) for o in overrides)
        if not is_list or not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name == ALL:
            allowed = "names of letters, digits and _ . = + -, but not `all`; lists of Hydra overrides, [] for none"
            raise _refused(f"arms.{name}", overrides, f"this is not a valid arm of {recipe}", allowed)
    require_each_once("--arm", names, "each arm once")
    if list(names) == [ALL]:
        names = list(known)
    _require_known("--arm", names, list(known), f"{recipe} has no such arm")
    return {name: tuple(known[name]) for name in names}


def with_seeds(arms: Arms, seeds: Sequence[int] = ()) -> list[PlannedRun]:
    """Return every arm with every seed, arm by arm; without seeds, every arm once."""
    return [
        PlannedRun(arm, seed, overrides if seed is None else (*overrides, f"seed={seed}"))
        for (arm, overrides), seed in product(arms.items(), seeds or (None,))
    ]


def check_arguments(
    config: Path,
    precisions: Sequence[str],
    overrides: Sequence[str],
    estimators: Sequence[str] = (),
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[PlannedRun]:
    """Return the runs of a comparison, or refuse what cannot be compared; `overrides` are for every run."""
    require_recipe(config)
    if arms and (precisions or estimators):
        allowed, remedy = "--arm, or --precision and --estimator, not both", "Write -p and -e into the recipe's arms."
        raise _refused("--arm", " ".join(arms), "an arm of the recipe already defines what differs", allowed, remedy)
    runs = with_seeds(recipe_arms(config, arms) if arms else preset_arms(precisions, estimators), seeds)
    require_overrides(overrides)
    require_each_once("--seed", seeds, "each seed once")
    # If a setting is given twice, Hydra refuses it in the middle of the comparison, or one of the values is lost.
    of_runs = {_key(override): run for run in runs for override in run.overrides}
    for override in (*overrides, *(own for run in runs for own in run.overrides)):
        key, value = _key(override), override.partition("=")[2]
        if key == "trainer.default_local_dir":
            allowed = "no value: each run has its own folder, <output>/<recipe>/<time>/<run>/checkpoints"
            remedy = "Leave it out, and choose the disk with --output."
            raise _refused(key, value, "the runs would resume from each other's checkpoints", allowed, remedy)
        if override in overrides and key in of_runs:
            allowed, remedy = "a setting that is the same in all runs", "Leave it out, or change the arms."
            raise _refused(key, value, f"the run {of_runs[key].name} sets another value for it", allowed, remedy)
    return runs


def _require_known(option: str, names: Sequence[str], known: Sequence[str], problem: str) -> None:
    for name in names:
        if name not in known:
            raise _refused(option, name, problem, ", ".join(known))


def _refused(setting: str, value: object, problem: str, allowed: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError(problem, setting=setting, value=value, allowed=allowed, remedy=remedy)


def preset_of(group: str, overrides: Sequence[str]) -> str | None:
    """Return the preset of a group that overrides choose, or None if they leave the choice to the recipe."""
    chosen = [value for key, _, value in (override.partition("=") for override in overrides) if _key(key) == group]
    return chosen[-1] if chosen else None


def _key(override: str) -> str:
    """Return what an override sets, without Hydra's prefixes."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]
