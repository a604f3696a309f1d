"""Composes the config of a run from a recipe, from overrides, or from a command.

A main of verl is a module with `hydra.main`. This decorator has the name and the folder of the config; it is read, not
run. A config is composed as `python -m verl.trainer.main_ppo --config-dir ... --config-name ...` does.
"""

import re
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError, VerlPrecisionError
from verl_precision.base.files import table_of
from verl_precision.base.versions import installed_version, require_packages
from verl_precision.check.keys import require_complete, require_overrides, unresolved
from verl_precision.check.who_decides import let_presets_win
from verl_precision.tools.checking.words import wrong_words

MAIN = "verl.trainer.main_ppo"
REFUSES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # errors that composing raises
_STARTER = re.compile(r"(^|/)(python[\d.]*|bash|sh|torchrun|accelerate|deepspeed|ray|srun|mpirun)$|\.(sh|py)$")
_CONFIG = re.compile(r'hydra\.main\(config_path="(\w+)", config_name="(\w+)"')


def read_command(words: Sequence[str], gone: list[ConfigurationError] | None = None) -> tuple[Path, list[str]]:
    """Return YAML and overrides of the typed words: a recipe with overrides, overrides of verl's config, or a command.

    A main that verl no longer has is refused. If there is a list `gone`, the refusal is appended to the list, and the
    config is that of the replacement main.

    Raises:
        ConfigurationError: For a shell script, whose command only a run shows, and for a main that is not verl's.
    """
    words = list(words)
    if (found := _main_in(words)) is not None:
        start, module = found
        return _composed_by(_config_of(module, gone), words[start + 1 :])
    first = words[0] if words else ""
    starter = any(_STARTER.search(word) and "=" not in word for word in words)
    if not first.strip() or (starter and not first.endswith((".yaml", ".yml"))):
        problem = f"`{' '.join(words)[:80]}` does not start a main of verl, and check runs no scripts"
        remedy = f"Give all of the command, e.g. python -m {MAIN} KEY=VALUE; in a script, write "
        remedy += "`verl-precision check --` before the command that starts verl."
        raise ConfigurationError(problem, allowed="a recipe, overrides, or verl's command", remedy=remedy)
    if first.startswith(("~", "-")) or ("=" in first and not Path(first).exists()):
        return _config_of(MAIN), words
    return Path(first), words[1:]


def _main_in(words: Sequence[str]) -> tuple[int, str] | None:
    """Return position and module of a command's main: verl's, or otherwise the first; None if the command has none."""
    found: list[tuple[int, str]] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        if re.fullmatch(r"-[A-Za-z]*m|--module", before) and re.fullmatch(r"\w+(\.\w+)*", word):
            found.append((number, word))
        elif re.search(r"(^|[./])main_ppo$|\.py$", word) and not re.search(r"[=\s]", word):
            found.append((number, _module_of(word)))
    of_verl = [each for each in found if re.match(r"(verl|recipe)\.", each[1])]
    return next(iter(of_verl or found), None)


def _module_of(script: str) -> str:
    """Return the module of a script's path; a bare main_ppo is verl's unless such a file is here."""
    if script.removesuffix(".py") == "main_ppo" and not Path(script).exists():
        return MAIN
    inside = re.fullmatch(r"(?:.*/)?((?:verl/(?:trainer|experimental)|recipe/\w+)/.+)\.py", script)
    return inside[1].replace("/", ".") if inside else script


def _composed_by(own: Path, words: list[str]) -> tuple[Path, list[str]]:
    flags = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)  # Hydra's
    flags.add_argument("--config-name", "-cn", default=own.name)
    flags.add_argument("--config-dir", "-cd")
    flags.add_argument("--config-path", "-cp")
    try:
        given, overrides = flags.parse_known_args(words)
    except ArgumentError as error:
        option = str(error.argument_name).partition("/")[0]
        remedy = f"Write {option}=VALUE."
        raise ConfigurationError("it is given without a value", setting=option, value="", remedy=remedy) from error
    main, name = own.parent, f"{given.config_name.removesuffix('.yaml')}.yaml"
    if given.config_path and given.config_path.startswith("pkg://"):
        main = _verl().parent / given.config_path.removeprefix("pkg://").replace(".", "/")
    elif given.config_path:  # relative to the main's file
        main = own.parent.parent / given.config_path.removeprefix("file://")
    every = [Path(folder) / name for folder in (given.config_dir, main) if folder]
    return next((path for path in every if path.is_file()), main / name), overrides


def _config_of(module: str, gone: list[ConfigurationError] | None = None) -> Path:
    """Return the default YAML of a main of verl; refuse a module that is no main, or does not run RL."""
    place, allowed, instead = _verl().parent.joinpath(*module.split(".")), ", ".join(mains()), ""
    files = (place.with_suffix(".py"), place / "__main__.py")
    path = next((path for path in files if module.startswith("verl.") and path.is_file()), None)
    if path is not None:
        if (own := _own_config(path)) is not None:
            return own
        problem, remedy = "it is not an RL run, so there is nothing to check", f"Give a command that runs {MAIN}."
    elif (row := next((row for old, row in table_of(__file__).items() if re.fullmatch(old, module)), None)) is None:
        problem = "it is not a main of verl, so its config is not known"
        remedy = f"Give the config itself: `check YAML KEY=VALUE ...`; or `check KEY=VALUE ...` if it is {MAIN}'s."
    else:
        problem = f"verl {installed_version('verl')} has no such module{row.get('why', '')}."
        instead, words = row.get("instead", ""), row.get("words", "")
        allowed = instead or allowed
        remedy = f"Start {instead}{f' with {words}' if words else ''}." if instead else words
    error = ConfigurationError(problem, setting="main", value=module, allowed=allowed, remedy=remedy)
    if gone is None or not instead:
        raise error
    gone.append(error)
    return _config_of(instead)


def _own_config(path: Path) -> Path | None:
    """Return the YAML that `hydra.main` names in a file; None if the file starts no RL run."""
    text = path.read_text(encoding="utf-8")
    found = _CONFIG.search(text) if "run_ppo" in text else None  # every main of RL calls run_ppo
    return found and path.parent / found[1] / f"{found[2]}.yaml"


def mains() -> list[str]:
    """Return every main of the installed verl that runs RL, main_ppo first."""
    files = [*_verl().glob("trainer/*.py"), *_verl().glob("experimental/*/*.py")]
    found = [".".join(path.with_suffix("").relative_to(_verl().parent).parts) for path in files if _own_config(path)]
    return sorted(found, key=lambda name: (name != MAIN, name))


def _verl() -> Path:
    require_packages("a config of verl's", "verl")
    spec = find_spec("verl")
    return Path(next(iter((spec and spec.submodule_search_locations) or ["."])))


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
        if wrong := mistyped(config):  # otherwise resolvers and rules would compute with text
            raise wrong[0]
        OmegaConf.resolve(config.actor_rollout_ref)
    except VerlPrecisionError:
        raise
    except REFUSES as error:
        raise next(iter(wrong_words(composed, path, overrides)[0]), in_our_words(error, path)) from error
    return config


def composer(path: Path) -> Callable[[Sequence[str]], DictConfig]:
    """Return a function that composes a recipe with overrides as verl does, with Hydra's own node."""
    own = OmegaConf.select(read_recipe(path), "hydra.searchpath") or []
    _verl()
    import verl  # noqa: F401 - loads the plugin, and with it search path and resolvers
    from hydra import compose, initialize_config_dir

    others = map(str, sorted(_verl().glob("experimental/*/config")))
    folders = ["pkg://verl.trainer.config", *others, *own, "pkg://verl_precision.presets"]
    quoted = ",".join("'" + folder.replace("'", r"\'") + "'" for folder in folders)

    def composed(chosen: Sequence[str]) -> DictConfig:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            searched = [f"hydra.searchpath=[{quoted}]", *chosen]
            return compose(path.stem, overrides=searched, return_hydra_config=True)

    return composed


def require_recipe(path: Path) -> None:
    """Refuse a recipe that does not exist, or that is a folder."""
    if path.is_dir():
        inside = [str(each) for each in sorted(path.glob("*.yaml"))] or ["the YAML itself"]
        problem, allowed = f"{path} is a folder, not a recipe", ", ".join(inside)
        raise ConfigurationError(problem, allowed=allowed, remedy=f"Give {inside[0]}.")
    if not path.is_file():
        remedy = "Give the YAML itself, e.g. recipes/quickstart/quickstart.yaml, from the repository's root."
        raise ConfigurationError(f"{path}: there is no such recipe", remedy=remedy)


def read_recipe(path: Path) -> DictConfig:
    """Return the YAML of a recipe; refuse a file that is no recipe, by file and line."""
    require_recipe(path)
    try:
        content = OmegaConf.load(path)
    except (*REFUSES, OSError) as error:  # OSError: a number instead of keys, or no right to read
        raise in_our_words(error, path) from error
    if not isinstance(content, DictConfig):
        raise ConfigurationError(f"{path} is not a recipe: its YAML has no keys")
    return content


def in_our_words(error: Exception, path: Path) -> ConfigurationError:
    """Return this package's error for one of Hydra, OmegaConf or YAML about a recipe or a word of the command."""
    if isinstance(error, OverrideParseException):
        problem, remedy = f"Hydra cannot read `{error.override}`", "Put quotes into the value: KEY=\"'VALUE'\"."
        return ConfigurationError(problem, allowed="KEY=VALUE, +KEY=VALUE or ~KEY", remedy=remedy)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return unresolved(error, path)
    said = " ".join(re.split(r"\w*\s*search path:", str(error), flags=re.I)[0].split())
    unread = isinstance(error, OSError | UnicodeDecodeError | yaml.YAMLError) and not isinstance(error, HydraException)
    what = "cannot be read" if unread else "does not compose"
    return ConfigurationError(f"{path}: {what}. {said}")


def recorded_config(folder: Path) -> DictConfig | None:
    """Return the config that a run wrote to its folder: Hydra's copy, or the settings beside its checkpoints."""
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
