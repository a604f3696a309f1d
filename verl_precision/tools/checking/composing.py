"""Compose a recipe as `python -m verl.trainer.main_ppo --config-dir ... --config-name ...` does.

The parser of YAML, Hydra and OmegaConf say what they could not do; here is said which word or line to change.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError, VerlPrecisionError
from verl_precision.base.versions import require_packages
from verl_precision.check.composition import require_complete, require_overrides, unresolved
from verl_precision.check.winning_words import let_presets_win
from verl_precision.presets import preset_groups, preset_names
from verl_precision.tools.checking.command import own_configs
from verl_precision.tools.checking.words import meant, wrong_words

REFUSES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # what composing raises
_EXAMPLE = "e.g. recipes/quickstart/quickstart.yaml"


def compose_recipe(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a recipe's YAML and Hydra overrides, with Hydra's own node.

    Raises:
        ConfigurationError: If the recipe is missing, is no YAML, does not compose, or lacks what verl needs.
        EnvironmentMismatchError: If verl is not installed.
    """
    require_overrides(overrides)
    composed = composer(path)
    from verl_precision.check.verl_refusals import mistyped  # imports verl

    try:
        config = composed(overrides)
        require_complete(config)
        let_presets_win(config)
        if wrong := mistyped(config):  # resolvers and rules would compute with the text
            raise wrong[0]
        OmegaConf.resolve(config.actor_rollout_ref)
    except VerlPrecisionError:
        raise
    except REFUSES as error:
        raise next(iter(wrong_words(composed, path, overrides)[0]), in_our_words(error, path)) from error
    return config


def composer(path: Path) -> Callable[[Sequence[str]], DictConfig]:
    """Return what composes a recipe with overrides as verl does, with Hydra's own node."""
    own = OmegaConf.select(read_recipe(path), "hydra.searchpath") or []
    require_packages("a config of verl's", "verl")
    import verl  # noqa: F401 - loads the plugin, and with it search path and resolvers
    from hydra import compose, initialize_config_dir

    folders = ["pkg://verl.trainer.config", *own_configs(), *own, "pkg://verl_precision.presets"]
    quoted = ",".join("'" + folder.replace("'", r"\'") + "'" for folder in folders)

    def composed(chosen: Sequence[str]) -> DictConfig:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            searched = [f"hydra.searchpath=[{quoted}]", *chosen]
            return compose(path.stem, overrides=searched, return_hydra_config=True)

    return composed


def require_recipe(path: Path) -> None:
    """Refuse a recipe that is not there, or a folder in its place."""
    if path.is_dir():
        inside = sorted(str(each) for each in path.glob("*.yaml"))
        remedy = f"Give {inside[0]}." if inside else f"Give the YAML itself, {_EXAMPLE}."
        allowed = ", ".join(inside) or "a recipe's YAML"
        raise ConfigurationError(f"{path} is a folder, not a recipe", allowed=allowed, remedy=remedy)
    if not path.is_file():
        remedy = f"Give the YAML itself, {_EXAMPLE}, from the repository's root."
        raise ConfigurationError(f"{path}: there is no such recipe", remedy=remedy)


def read_recipe(path: Path) -> DictConfig:
    """Return the YAML of a recipe that is there; refuse by file and line what is none."""
    require_recipe(path)
    try:
        content = OmegaConf.load(path)
    except (*REFUSES, OSError) as error:  # OSError: a number in place of keys, or no rights
        raise in_our_words(error, path) from error
    if not isinstance(content, DictConfig):
        raise ConfigurationError(f"{path} is not a recipe: its YAML has no keys")
    return content


def in_our_words(error: Exception, path: Path | str) -> ConfigurationError:
    """Return what is wrong with a recipe, or with a word that cannot be read, from the error that it led to."""
    said = " ".join(re.split(r"\w*\s*search path:", str(error), flags=re.I)[0].split())
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        file = path if mark is None or not Path(mark.name).is_file() else mark.name
        place = f"{file}, line {mark.line + 1}" if mark else str(file)
        why = getattr(error, "problem", None) or said
        remedy = "Correct that line, or the one above: most often an indent, a bracket or a quote."
        return ConfigurationError(f"{place}: this is not YAML: {why}", remedy=remedy)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        allowed = ", ".join(preset_names(group) if group in preset_groups() else error.options)
        problem, remedy = "there is no such preset", meant(short(name), error.options)
        return ConfigurationError(problem, setting=group, value=name, allowed=allowed, remedy=remedy)
    if isinstance(error, OverrideParseException):
        problem, remedy = f"Hydra cannot read `{error.override}`", "Put quotes into the value: KEY=\"'VALUE'\"."
        return ConfigurationError(problem, allowed="KEY=VALUE, +KEY=VALUE or ~KEY", remedy=remedy)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return unresolved(error, path)
    what = "cannot be read" if isinstance(error, OSError | UnicodeDecodeError) else "does not compose"
    return ConfigurationError(f"{path}: {what}. {said}")


def recorded_config(folder: Path) -> DictConfig | None:
    """Return the config that a run has left in its folder: Hydra's own copy, or the settings beside its checkpoints."""
    import verl  # noqa: F401 - loads the plugin, and with it the resolvers

    from verl_precision.integration.trainer.run_identity import run_in

    for copy in (folder / "hydra" / ".hydra" / "config.yaml", folder / ".hydra" / "config.yaml"):
        if copy.is_file():
            return OmegaConf.load(copy)
    if known := run_in(folder):
        config = OmegaConf.create()
        for name, value in known.settings.items():
            OmegaConf.update(config, name, value, force_add=True)
        return config
    return None
