"""Compose a recipe as `python -m verl.trainer.main_ppo --config-dir ... --config-name ...` does; ask every rule."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError, VerlPrecisionError, sentence
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.base.versions import require_packages
from verl_precision.check.composition import in_our_words, read_recipe, require_complete, require_overrides
from verl_precision.check.keys import added, keys_of, merged, unread_word
from verl_precision.check.probe import gpus_here, probe_environment
from verl_precision.check.rules.gpu_memory import gpu_memory, require_known_gpu
from verl_precision.check.rules.memory import chosen_scale
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import SEVERITIES, Fault, Severity, as_fault
from verl_precision.check.verl_refusals import mistyped
from verl_precision.check.winning_words import REPLACED, WinningWord, added_again, let_presets_win, winning_words
from verl_precision.integration.trainer.run_identity import name_the_run, run_in
from verl_precision.integration.trainer.saving import saves
from verl_precision.presets import preset_groups
from verl_precision.tools.checking.command import Command, own_configs, unfound_folders
from verl_precision.tools.checking.dtype_table import Row, dtype_table
from verl_precision.tools.checking.training_table import TrainingRow, training_table
from verl_precision.tools.checking.way_out import WayOut, way_out


@dataclass(frozen=True)
class RecipeReport:
    """What a recipe will do."""

    rows: list[Row]  # what runs in which dtype
    faults: list[Fault]  # every fault, errors first
    folder: str | None = None  # where checkpoints will be, with the run's digest; None: a run without
    training: Sequence[TrainingRow] = ()  # what is trained
    words: Sequence[WinningWord] = ()  # of the command that win over presets, those that contradict none too
    replaced: Sequence[Mapping[str, Any]] = ()  # words over which presets won, with presets=win
    way_out: WayOut | None = None  # what to type instead

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings, and what could not be looked at, do not count."""
        return all(fault.severity != "error" for fault in self.faults)

    @property
    def counts(self) -> dict[Severity, int]:
        """How many errors, warnings, and things that could not be looked at there are."""
        found = [fault.severity for fault in self.faults]
        return {severity: found.count(severity) for severity in SEVERITIES}

    def as_json(self) -> str:
        """Return it for machines."""
        lists = {
            "dtypes": self.rows,
            "training": self.training,
            "findings": self.faults,
            "words_over_presets": self.words,
        }
        content = {"ok": self.ok, "counts": self.counts, **{key: [*map(vars, rows)] for key, rows in lists.items()}}
        way_out = self.way_out and vars(self.way_out)
        content |= {"replaced": self.replaced, "way_out": way_out, "checkpoints": self.folder}
        return json.dumps(content, indent=2, default=str)


@dataclass(frozen=True)
class Meant:
    """What a user says of the machine and the model that a run is meant for."""

    gpu: str | None = None  # name of the GPU; None: that of this machine
    elsewhere: bool | None = None  # whether the run is for another machine; None: it is told by the config and the GPUs
    model_config: Path | None = None  # a config.json, or its folder, that stands for the model's


HERE = Meant()  # nothing is said


def check_command(command: Command, meant: Meant = HERE, typed: Sequence[str] = ()) -> RecipeReport:
    """Check what a command composes; with words that it has to change, these alone, all of them at once.

    Rules would only tell what follows from such words. `typed` is what the command was read of.

    Raises:
        ConfigurationError: If it does not compose for another reason.
    """
    wrong = [as_fault(command.refusal, "main-gone", "error")] if command.refusal is not None else []
    try:
        report = check_recipe(command.path, command.overrides, meant, typed)
    except ConfigurationError:
        if not (keys := wrong_words(command.path, command.overrides)):
            raise
        return RecipeReport([], [replace(each, problem=sentence(each.problem)) for each in wrong + keys])
    return replace(report, faults=wrong + report.faults)


def check_recipe(path: Path, overrides: Sequence[str], meant: Meant = HERE, typed: Sequence[str] = ()) -> RecipeReport:
    """Compose a recipe as verl would, and ask every rule; `typed` is the command of which path and overrides were read.

    What is wrong with this machine (data, memory) is an error in a run and a warning here, or, where the run is for
    another machine, something that could not be looked at: a recipe is often checked elsewhere than it runs.
    """
    config = compose_recipe(path, overrides)
    unread = fit_to_engine(config)
    try:
        name_the_run(config)
        here = gpus_here() if config.trainer.device == "cuda" else ()
        gpus = here if meant.gpu is None else (require_known_gpu(meant.gpu),)
        environment = probe_environment(config, gpus, why_elsewhere(config, meant, here), meant.model_config)
        faults = find_faults(config, environment, this_machine=False)
        faults += [as_fault(note, "not-carried-over", "warning") for note in unread]
        faults = merged(faults, [*unfound_folders(path, overrides), *added(config, overrides)])
        folder = config.trainer.default_local_dir if saves(config) else None
        replaced = OmegaConf.to_container(OmegaConf.select(config, REPLACED, default=OmegaConf.create([])))
        words, way = winning_words(config), way_out(config, path, overrides, typed)
        rows = list(dtype_table(config, environment.model))
        return RecipeReport(rows, faults, folder, training_table(config), words, replaced, way)
    except OmegaConfBaseException as error:
        raise in_our_words(error, path) from error


def why_elsewhere(config: DictConfig, meant: Meant, here: Sequence[str]) -> str:
    """Return why a run is taken to be for another machine than this one; empty if it is for this one.

    `here` are the names of this machine's GPUs. A run on a CPU is for any machine, and so for this one.
    """
    if meant.elsewhere is not None:
        return "--elsewhere" if meant.elsewhere else ""
    if config.trainer.device == "cpu":
        return ""
    if meant.gpu is not None:
        return f"--gpu {meant.gpu}"
    if not here:
        return f"trainer.device={config.trainer.device}, and no such device is here"
    scale = chosen_scale(config)
    named = gpu_memory(scale.replace("_", " "))
    others = named is not None and all(gpu_memory(name) != named for name in here)
    return f"scale={scale}, and here is {here[0]}" if others else ""


def compose_recipe(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a recipe's YAML and Hydra overrides, with Hydra's own node.

    Raises:
        ConfigurationError: If the recipe is missing, is no YAML, does not compose, or lacks what verl needs.
        EnvironmentMismatchError: If verl is not installed.
    """
    require_overrides(overrides)
    composed = _composer(path)
    from hydra.errors import HydraException

    def keys() -> Iterator[str]:
        """Yield every setting there is before any is changed: with the presets that were chosen alone."""
        every = (*preset_groups(), "model_engine")
        groups = [each for each in overrides if each.lstrip("+").partition("=")[0] in every]
        return keys_of(OmegaConf.to_container(composed(groups), resolve=False))

    try:
        config = composed(overrides)
        require_complete(config)
        let_presets_win(config)
        if wrong := mistyped(config):  # resolvers and rules would compute with the text
            raise wrong[0]
        OmegaConf.resolve(config.actor_rollout_ref)
    except VerlPrecisionError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        again = added_again(overrides, composed) if "already at" in str(error) else None
        raise (again[0] if again else in_our_words(error, path, overrides, keys)) from error
    return config


def _composer(path: Path) -> Callable[[Sequence[str]], DictConfig]:
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


def wrong_words(path: Path, overrides: Sequence[str]) -> list[Fault]:
    """Return a fault for each key that verl does not have, or has already where it is added, as Hydra finds them.

    Nothing where Hydra cannot read a word, or what groups a config is made of: that is one error by itself.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import ConfigCompositionException, HydraException

    composed = _composer(path)
    try:
        words = OverridesParser.create().parse_overrides(list(overrides))
        every = {*preset_groups(), *OmegaConf.to_container(composed([]).hydra.runtime.choices)}
        groups = [
            word.input_line for word in words if word.key_or_group in every and not isinstance(word.value(), dict)
        ]
        config = composed(groups)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError):
        return []
    known = set(keys_of(OmegaConf.to_container(config, resolve=False)))
    of_presets, settled = added_again(overrides, composed) or (None, set())
    said = []
    for word in (each for each in words if each.input_line not in {*groups, *settled}):
        key, value, adds = word.key_or_group, word.value(), word.is_add() or word.is_force_add()
        if word.is_add() and key in known and not _is_open(config, key, value):
            said.append(f"An item is already at '{key}'")
        elif adds or key in known:
            known |= {key, *(key[:end] for end, letter in enumerate(key) if letter == "."), *keys_of(value, f"{key}.")}
        else:
            said.append(f"Could not {'delete from config.' if word.is_delete() else 'override'} '{key}'")
    errors = [] if of_presets is None else [of_presets]
    errors += [in_our_words(ConfigCompositionException(each), path, overrides, lambda: iter(known)) for each in said]
    if not errors:
        return []
    errors += [unread for word in overrides if (unread := unread_word(config, word)) is not None]
    faults = [as_fault(error, "unknown-key", "error") for error in errors]
    named = {fault.setting for fault in faults}
    return merged(faults, (fault for fault in added(config, overrides) if fault.setting not in named))


def _is_open(config: DictConfig, key: str, value: object) -> bool:
    """Return whether Hydra lets + write to a key that is there: it is null, or a block or a list is merged."""
    return isinstance(value, dict | list) or OmegaConf.is_missing(config, key) or OmegaConf.select(config, key) is None


def recorded_config(folder: Path) -> DictConfig | None:
    """Return the config that a run has left in its folder: Hydra's own copy, or the settings beside its checkpoints."""
    import verl  # noqa: F401 - loads the plugin, and with it the resolvers

    for copy in (folder / "hydra" / ".hydra" / "config.yaml", folder / ".hydra" / "config.yaml"):
        if copy.is_file():
            return OmegaConf.load(copy)
    if known := run_in(folder):
        config = OmegaConf.create()
        for name, value in known.settings.items():
            OmegaConf.update(config, name, value, force_add=True)
        return config
    return None
