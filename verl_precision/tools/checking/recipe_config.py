"""What a recipe or a command will run, and every fault of it."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.check.composition import unresolved
from verl_precision.check.keys import keys_of
from verl_precision.check.probe import gpus_here, probe_environment
from verl_precision.check.rules.gpu_memory import chosen_scale, gpu_memory, require_known_gpu
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import SEVERITIES, Fault, Severity, fault_of_error
from verl_precision.check.winning_words import REPLACED, WIN, WinningWord, winning_words
from verl_precision.integration.trainer.run_identity import name_the_run
from verl_precision.integration.trainer.saving import saves
from verl_precision.tools.checking.composing import MAIN, compose_recipe, composer
from verl_precision.tools.checking.tables import Row, dtype_table, training_table
from verl_precision.tools.checking.words import added, unknown, wrong_words


@dataclass(frozen=True)
class RecipeReport:
    """The report of a check of a recipe."""

    rows: Sequence[Row]  # what runs in which dtype
    faults: list[Fault]  # every fault, errors first
    folder: str | None = None  # where checkpoints will be, with the run's digest; None: a run without
    training: Sequence[Row] = ()  # what is trained
    words: Sequence[WinningWord] = ()  # of the command that win over presets, those that contradict none too
    replaced: Sequence[Mapping[str, Any]] = ()  # words over which presets won, with presets=win
    way_out: Mapping[str, Any] | None = None  # words that contradict presets, and the whole command without them

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings and unchecked items do not count."""
        return not self.counts["error"]

    @property
    def counts(self) -> dict[Severity, int]:
        """Number of errors, warnings and unchecked items."""
        found = [fault.severity for fault in self.faults]
        return {severity: found.count(severity) for severity in SEVERITIES}

    def as_json(self) -> str:
        """Return the report as JSON."""
        content: dict[str, Any] = {"ok": self.ok, "counts": self.counts}
        content["dtypes"] = [{"what": row.what, "dtype": row.value, "source": row.source} for row in self.rows]
        content["training"] = [row._asdict() for row in self.training]
        content |= {"findings": [*map(vars, self.faults)], "words_over_presets": [*map(vars, self.words)]}
        content |= {"replaced": self.replaced, "way_out": self.way_out, "checkpoints": self.folder}
        return json.dumps(content, indent=2, default=str)


@dataclass(frozen=True)
class Meant:
    """The machine and the model that a user names for a run."""

    gpu: str | None = None  # name of the GPU; None: that of this machine
    model_config: Path | None = None  # a config.json, or its folder, that stands for the model's


HERE = Meant()  # nothing is said


def check_command(path: Path, overrides: Sequence[str], meant: Meant, typed: Sequence[str]) -> RecipeReport:
    """Check the config of a command; if Hydra refuses words of it, report all of these words instead.

    Rules would only tell what follows from such words. Path and overrides were read of what was typed.

    Raises:
        ConfigurationError: If it does not compose for another reason.
    """
    try:
        return check_recipe(path, overrides, meant, typed)
    except ConfigurationError:
        wrong, config = wrong_words(composer(path), path, overrides)
        if not wrong:
            raise
        named = {error.setting for error in wrong}
        others = [fault for fault in added(config, overrides) if fault.setting not in named]
        return RecipeReport([], _merged([fault_of_error(error, "unknown-key", "error") for error in wrong], others))


def _merged(faults: list[Fault], of_words: Iterable[Fault]) -> list[Fault]:
    """Return the faults of the rules and of a command's words, errors first, one for one cause."""
    told = list(of_words)
    wrong = [f"{each.setting}." for each in told if each.severity == "error"]
    refused = [f"{each.setting}." for each in faults if each.name == "verl-refuses"]
    for fault in faults:
        same = {"verl-refuses": wrong, "setting-ignored": wrong + refused}.get(fault.name, [])
        if not any(key.startswith(f"{fault.setting}.") for key in same):
            told.append(fault)
    return sorted((replace(each, problem=sentence(each.problem)) for each in told), key=lambda each: each.rank)


def _with_hint(fault: Fault, config: DictConfig) -> Fault:
    """Return the refusal of a name that a class of verl's does not take with the name that may be meant."""
    if "unexpected keyword argument" not in fault.problem or OmegaConf.is_dict(OmegaConf.select(config, fault.setting)):
        return fault
    every = {*keys_of(OmegaConf.to_container(config, resolve=False))} - {fault.setting}
    return replace(fault, remedy=unknown(fault.setting, str(fault.value), every).remedy)


def check_recipe(path: Path, overrides: Sequence[str], meant: Meant = HERE, typed: Sequence[str] = ()) -> RecipeReport:
    """Compose a recipe as verl would, and ask every rule.

    What is wrong with this machine (data, memory) is an error in a run and a warning here, or, where the run is for
    another machine, something that could not be looked at: a recipe is often checked elsewhere than it runs.
    """
    config = compose_recipe(path, overrides)
    fit_to_engine(config)
    try:
        name_the_run(config)
        here = gpus_here() if config.trainer.device == "cuda" else ()
        gpus = here if meant.gpu is None else (require_known_gpu(meant.gpu),)
        environment = probe_environment(config, gpus, why_elsewhere(config, meant, here), meant.model_config)
        faults = [_with_hint(each, config) for each in find_faults(config, environment, this_machine=False)]
        words = winning_words(config)
        meant_to_win = OmegaConf.select(config, WIN) is False
        contradicting = [each.word for each in words if each.contradicts and not meant_to_win]
        return RecipeReport(
            rows=list(dtype_table(config)),
            faults=_merged(faults, added(config, overrides)),
            folder=config.trainer.default_local_dir if saves(config) else None,
            training=training_table(config, words),
            words=words,
            replaced=OmegaConf.to_container(OmegaConf.select(config, REPLACED, default=OmegaConf.create([]))),
            way_out=_way_out(list(dict.fromkeys(contradicting)), path, overrides, typed),
        )
    except OmegaConfBaseException as error:
        raise unresolved(error, path) from error


def _way_out(leave_out: list[str], path: Path, overrides: Sequence[str], typed: Sequence[str]) -> dict[str, Any] | None:
    """Return words to leave out, and the whole command without them: what was typed, or what starts the recipe."""
    if not leave_out:
        return None
    front = ["python", "-m", MAIN]
    if list(typed) != list(overrides):
        front += ["--config-dir", str(path.parent), "--config-name", path.stem]
    is_command = typed and list(typed) != list(overrides) and Path(typed[0]) != path
    whole = typed if is_command else [*front, *overrides]
    return {"leave_out": leave_out, "command": shlex.join(word for word in whole if word not in leave_out)}


def why_elsewhere(config: DictConfig, meant: Meant, here: Sequence[str]) -> str:
    """Return why a run is for another machine than this one with these GPUs; empty if it is for this one.

    A run on a CPU is for any machine, and so for this one.
    """
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
