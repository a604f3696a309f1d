"""What a recipe or a command will run, and every fault of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.check.composition import unresolved
from verl_precision.check.probe import gpus_here, probe_environment
from verl_precision.check.rules.gpu_memory import gpu_memory, require_known_gpu
from verl_precision.check.rules.memory import chosen_scale
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import SEVERITIES, Fault, Severity, fault_of_error
from verl_precision.check.winning_words import REPLACED, WIN, WinningWord, winning_words
from verl_precision.integration.trainer.run_identity import name_the_run
from verl_precision.integration.trainer.saving import saves
from verl_precision.tools.checking.command import Command
from verl_precision.tools.checking.composing import compose_recipe, composer
from verl_precision.tools.checking.dtype_table import Row, dtype_table
from verl_precision.tools.checking.training_table import TrainingRow, training_table
from verl_precision.tools.checking.way_out import WayOut, way_out
from verl_precision.tools.checking.words import added, wrong_words


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
    gone = [fault_of_error(command.refusal, "main-gone", "error")] if command.refusal is not None else []
    try:
        report = check_recipe(command.path, command.overrides, meant, typed)
    except ConfigurationError:
        if not (wrong := _faults_of_words(command.path, command.overrides)):
            raise
        return RecipeReport([], [replace(each, problem=sentence(each.problem)) for each in gone + wrong])
    return replace(report, faults=gone + report.faults)


def _faults_of_words(path: Path, overrides: Sequence[str]) -> list[Fault]:
    """Return a fault for each word that keeps a command from being composed, and for what others add for nobody."""
    errors, config = wrong_words(composer(path), path, overrides)
    if not errors:
        return []
    faults = [fault_of_error(error, "unknown-key", "error") for error in errors]
    named = {fault.setting for fault in faults}
    return merged(faults, (fault for fault in added(config, overrides) if fault.setting not in named))


def merged(faults: list[Fault], of_words: Iterable[Fault]) -> list[Fault]:
    """Return the faults of the rules and of a command's words, errors first, one for one cause."""
    named = {each.setting for each in faults}
    own = [replace(each, problem=sentence(each.problem)) for each in of_words]
    own = [each for each in own if each.name != "key-unread" or each.setting not in named]
    wrong = [each.setting for each in own if each.severity == "error"]
    names = {name for key in wrong for name in key.split(".")}
    rest = [
        fault for fault in faults
        if not any(f"unexpected keyword argument '{name}'" in fault.problem for name in names)
        and not (fault.name == "setting-ignored" and any(f"{key}.".startswith(f"{fault.setting}.") for key in wrong))
    ]  # fmt: skip
    return sorted([*rest, *own], key=lambda fault: SEVERITIES.index(fault.severity or "error"))


def check_recipe(path: Path, overrides: Sequence[str], meant: Meant = HERE, typed: Sequence[str] = ()) -> RecipeReport:
    """Compose a recipe as verl would, and ask every rule; `typed` is the command of which path and overrides were read.

    What is wrong with this machine (data, memory) is an error in a run and a warning here, or, where the run is for
    another machine, something that could not be looked at: a recipe is often checked elsewhere than it runs.
    """
    config = compose_recipe(path, overrides)
    not_carried_over = fit_to_engine(config)
    try:
        name_the_run(config)
        here = gpus_here() if config.trainer.device == "cuda" else ()
        gpus = here if meant.gpu is None else (require_known_gpu(meant.gpu),)
        environment = probe_environment(config, gpus, why_elsewhere(config, meant, here), meant.model_config)
        faults = find_faults(config, environment, this_machine=False)
        faults += [fault_of_error(note, "not-carried-over", "warning") for note in not_carried_over]
        faults = merged(faults, added(config, overrides))
        folder = config.trainer.default_local_dir if saves(config) else None
        replaced = OmegaConf.to_container(OmegaConf.select(config, REPLACED, default=OmegaConf.create([])))
        words = winning_words(config)
        way = None if OmegaConf.select(config, WIN) is False else way_out(words, path, overrides, typed)
        rows = list(dtype_table(config, environment.model))
        return RecipeReport(rows, faults, folder, training_table(config, words), words, replaced, way)
    except OmegaConfBaseException as error:
        raise unresolved(error, path) from error


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
