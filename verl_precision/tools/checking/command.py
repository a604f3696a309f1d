"""From what a user types to the config that it runs with: a recipe, overrides alone, or a command and its main.

A main of verl's is a module with `hydra.main`: name and folder of its config stand in that decorator, which is read and
not run.
"""

import ast
import re
import shlex
from argparse import ArgumentError, ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.versions import installed_version, require_packages

MAIN = "verl.trainer.main_ppo"
_RUNNER = re.compile(r"(^|/)(python[\d.]*|bash|sh|torchrun|accelerate|deepspeed|ray|srun|mpirun)$|\.(sh|py)$")
_ALLOWED = "a recipe, overrides, or verl's command"
_SHELL = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "#")


class Command(NamedTuple):
    """What a run would be composed of."""

    path: Path  # its YAML
    overrides: list[str]
    refusal: ConfigurationError | None = None  # of its main, where the YAML is that of the main to take instead

    def accepted(self) -> tuple[Path, list[str]]:
        """Return YAML and overrides; raise the refusal."""
        if self.refusal is not None:
            raise self.refusal
        return self.path, self.overrides


def read_command(words: Sequence[str]) -> Command:
    """Return recipe and overrides of what was typed: both, overrides of verl's own config alone, or a whole command.

    A shell script is refused: what it would do is not known without running it.
    """
    words = list(words)
    if not any(word.strip() for word in words):
        raise ConfigurationError("there is no command", allowed=_ALLOWED, remedy="Write it behind `check --`.")
    if (found := _main_in(words)) is None:
        for word in words:  # bash -c "python -m ...", or the whole command in quotes
            if len(inner := _split(word)) > 1 and _main_in(inner) is not None:
                return read_command(inner)
        runner = next((word for word in words if _RUNNER.search(word) and "=" not in word), None)
        if runner is None or words[0].endswith((".yaml", ".yml")):
            if words[0].startswith(("~", "-")) or ("=" in words[0] and not Path(words[0]).exists()):
                return Command(_config_of(MAIN), words)
            return Command(Path(words[0]), words[1:])
        problem = f"`{_shortened(words)}` does not name verl.trainer.main_ppo, and no script is run to see that"
        remedy = "In the script, write `verl-precision check --` before the command that starts verl, and run it."
        if not re.search(r"\.(sh|py)$|sh$", runner):
            problem = f"`{_shortened(words)}` starts no main of verl's"
            remedy = f"Give all of the command, e.g. python -m {MAIN} KEY=VALUE."
        raise ConfigurationError(problem, allowed=_ALLOWED, remedy=remedy)
    start, module = found
    require_packages("a config of verl's", "verl")
    refusal = None
    if _file_of(module) is None:
        module, refusal = _gone(module)
    return _composed_by(module, words[start + 1 :], refusal)


def _composed_by(module: str, words: list[str], refusal: ConfigurationError | None) -> Command:
    own = _config_of(module)
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
    if given.config_path:
        package = given.config_path.removeprefix("pkg://").replace(".", "/")
        of_verl = _verl().parent / package
        path = of_verl if "pkg://" in given.config_path else Path(given.config_path.removeprefix("file://"))
        main = (_file_of(module) or own).parent / path  # relative to the main's file
    every = [Path(folder) / name for folder in (given.config_dir, main) if folder]
    return Command(next((path for path in every if path.is_file()), main / name), overrides, refusal)


def _main_in(words: Sequence[str]) -> tuple[int, str] | None:
    """Return place and module of what a command runs: verl's, or else the first one; None where it names none."""
    found: list[tuple[int, str]] = []
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        if re.fullmatch(r"-[A-Za-z]*m|--module", before) and re.fullmatch(r"\w+(\.\w+)*", word):
            found.append((number, word))
        elif close := re.fullmatch(r"-m(\w+(\.\w+)+)", word):
            found.append((number, close[1]))
        elif re.search(r"(^|[./])main_ppo$|\.py$", word) and not re.search(r"[=\s]", word):
            found.append((number, _module_of(word)))
    of_verl = [each for each in found if re.match(r"(verl|recipe)\.", each[1])]
    return next(iter(of_verl or found), None)


def _module_of(word: str) -> str:
    """Return the module of a script's path; a bare main_ppo is verl's unless such a file is here."""
    if "/" not in word and word.removesuffix(".py") == "main_ppo" and not Path(word).exists():
        return MAIN
    parts = word.removesuffix(".py").strip("./").split("/")
    tops = [place for place, part in enumerate(parts) if part in ("verl", "recipe")]
    inside = ".".join(parts[tops[-1] :]) if tops else ""
    is_known = re.match(r"recipe\.\w+\.|verl\.(trainer|experimental)\.", inside) or _file_of(inside)
    return inside if is_known else word


def _gone(module: str) -> tuple[str, ConfigurationError]:
    """Return the main to take instead of one that the installed verl does not have, and what to say of it.

    Raises:
        ConfigurationError: If there is none, or the module is somebody's own.
    """
    told = next((row for pattern, row in table_of(__file__).items() if re.fullmatch(pattern, module)), None)
    said, allowed = {"setting": "main", "value": module}, ", ".join(mains())
    if told is None:
        problem = "it is no main of verl's: the config that it composes is not known"
        remedy = f"Give the config: `check YAML KEY=VALUE ...`; or `check KEY=VALUE ...` if it takes that of {MAIN}."
        raise ConfigurationError(problem, **said, allowed=allowed, remedy=remedy)
    problem = f"verl {installed_version('verl')} has no such module{told.get('why', '')}"
    instead, words = told.get("instead", ""), told.get("words", "")
    remedy = f"Start {instead}{f' with {words}' if words else ''}." if instead else words
    error = ConfigurationError(problem, **said, allowed=instead or allowed, remedy=remedy)
    if not instead:
        raise error
    return instead, error


def _config_of(module: str) -> Path:
    """Return the YAML that a main of verl's takes by itself.

    Raises:
        ConfigurationError: If the module is no main, or no run of RL.
    """
    path = _file_of(module) or _verl() / "__init__.py"
    if (own := _own_config(path)) is None:
        problem, remedy = "it is no RL run: there is nothing to check", f"Give a command that runs {MAIN}."
        raise ConfigurationError(problem, setting="main", value=module, allowed=", ".join(mains()), remedy=remedy)
    return path.parent / own


def _own_config(path: Path) -> str | None:
    """Return the YAML that `hydra.main` names in a file, from its folder; None where it starts no run of RL."""
    text = path.read_text(encoding="utf-8")
    if "hydra.main" not in text or "run_ppo" not in text:  # what each main of RL calls
        return None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            own = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
            return f"{own['config_path']}/{own['config_name']}.yaml"
    return None


def mains() -> list[str]:
    """Return every main of the installed verl that runs RL, its own first."""
    files = [*_verl().glob("trainer/*.py"), *_verl().glob("experimental/*/*.py")]
    found = [".".join(path.with_suffix("").relative_to(_verl().parent).parts) for path in files if _own_config(path)]
    return sorted(found, key=lambda name: (name != MAIN, name))


def own_configs() -> list[str]:
    """Return the folders of the configs that mains of verl's have beside `verl.trainer.config`."""
    return [str(folder) for folder in sorted(_verl().glob("experimental/*/config"))]


def _file_of(module: str) -> Path | None:
    if module.partition(".")[0] != "verl":
        return None
    place = _verl().parent.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__main__.py") if path.is_file()), None)


def _verl() -> Path:
    require_packages("a config of verl's", "verl")
    spec = find_spec("verl")
    return Path(next(iter((spec and spec.submodule_search_locations) or ["."])))


def _split(word: str) -> list[str]:
    """Return the words of a command in quotes, up to the shell's next one."""
    try:
        inner = shlex.split(word.replace("\\\n", " "))
    except ValueError:  # a quote that is not closed: no command
        return []
    start = (_main_in(inner) or (0, ""))[0]
    end = next((n for n, each in enumerate(inner) if n > start and each.strip(";") in _SHELL), len(inner))
    return inner[:end]


def _shortened(words: Sequence[str]) -> str:
    said = " ".join(words[:4])
    return said if len(said) < 100 else f"{said[:97]}..."
