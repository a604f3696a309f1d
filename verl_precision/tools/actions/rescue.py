"""The rescue, `mismatch.alarm.on_alarm=rescue`: a new run that resumes in FP16 from before the alarm's evidence.

It needs an alarm that a smaller gap cures, evidence for some further steps, and no alarm of a fault (docs/alarm.md).

The trainer (`Remedy`) writes `rescue.yaml` into the folders of both runs and ends its run with that step. The driver
then starts the rescue (`go_on`): the same command with other settings. It resumes from the newest checkpoint of its
parent (the rescued run) before the evidence, or from the start. A later start of the parent's command continues the
rescue. Without the file, or with another `on_alarm`, that command continues the parent.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic.dataclasses import dataclass

from verl_precision.base.files import write_file
from verl_precision.base.loggers import mismatch as logger
from verl_precision.base.overrides import quoted
from verl_precision.base.state import STRICT, read_state
from verl_precision.integration.trainer.checkpoints import MARK, RESCUE_FILE, checkpoints_in, is_complete
from verl_precision.integration.trainer.saving import end_with_this_step
from verl_precision.mismatch.drift_detector import Persistence
from verl_precision.mismatch.settings import ON_ALARM

# Alarms that a smaller gap cures, and alarms of a fault, which prevent a rescue.
CURABLE: tuple[str, ...] = ("low_effective_sample_size", "k3_growth", "gap_growth", "phantom_clipping")
FAULTS: tuple[str, ...] = ("trainer_not_finite", "rollout_not_finite", "responses_not_finite", "policies_differ")
FAULTS += ("repeated_overflow", "loss_scale_at_minimum")


class Action(NamedTuple):
    """The action that an alarm starts."""

    alarm: str  # the first active alarm that a rescue cures
    step: int
    since_step: int  # first step of the evidence


@dataclass(frozen=True, config=STRICT)
class Rescue:
    """A rescue, as `rescue.yaml` describes it."""

    parent: str  # folder of the rescued run
    alarm: str
    step: int  # at which the rescued run ended
    since_step: int  # first step of the evidence
    checkpoint: str | None  # from which the rescue resumes; None: from the start
    name: str  # of the new run
    folder: str  # of the new run
    precision: Literal["fp16"]  # the last line of the file: a truncated file lacks it


class Remedy:
    """The trainer callback that decides after each step whether a rescue starts; if so, the run ends with that step."""

    def __init__(self, trainer: Any) -> None:
        """Start without evidence, in a resumed run too. A run that is a rescue starts no other rescue."""
        self._trainer, settings = trainer, trainer.monitor.settings.alarm
        self._acts, self._is_rescue = settings.on_alarm == "rescue", is_rescue(trainer.config)
        self._persistence = Persistence(settings.action_patience)

    def _compute_metrics(self, proceed: Any, batch: Any, metrics: Any, *args: Any, **more: Any) -> None:
        metrics["alarm/rescue"] = int(self._is_rescue)
        proceed(batch, metrics, *args, **more)
        begun = self.decide(more["global_steps"], self._trainer.monitor.alarm.active_since)
        if begun is not None:
            decide_rescue(self._trainer.config, begun)
            end_with_this_step(self._trainer)

    def decide(self, step: int, active: Mapping[str, int]) -> Action | None:
        """Return the action that starts after a step; `active` has the step of each active alarm's first evidence."""
        curable = [name for name in CURABLE if name in active]
        due = self._persistence.update(step, bool(curable) and not any(name in active for name in FAULTS))
        if not (due and self._acts):
            return None
        begun = Action(curable[0], step, min(active[name] for name in curable))
        logger.warning("ACTION rescue at step %d: %s since step %d", step, begun.alarm, begun.since_step)
        return begun


def decide_rescue(config: DictConfig, action: Action) -> Rescue:
    """Write the rescue of a run to its file, and keep the newest complete checkpoint from before the evidence."""
    folder = Path(config.trainer.default_local_dir).absolute()
    contents = config.actor_rollout_ref.actor.checkpoint.load_contents
    before = [path for step, path in checkpoints_in(folder).items() if step < action.since_step]
    whole = [path for path in before if is_complete(path, contents)]
    if whole:
        write_file(whole[-1] / MARK, f"A rescue run resumes from here: {folder.name}-rescue.\n", replace=True)
    name, checkpoint = f"{config.trainer.experiment_name}-rescue", str(whole[-1]) if whole else None
    rescue = Rescue(str(folder), *action, checkpoint, name, f"{folder}-rescue", precision="fp16")
    content = yaml.safe_dump({"checksum": _checksum(asdict(rescue)), **asdict(rescue)}, sort_keys=False)
    for place in (folder, Path(rescue.folder)):
        write_file(place / RESCUE_FILE, content, replace=True)
    return rescue


def read_rescue(folder: Path) -> Rescue | None:
    """Return the rescue of a folder's file, None without a file. A checksum protects the names of folders in it."""
    remedy = f"Correct it and delete its line `checksum`, or remove {RESCUE_FILE} to continue the run as it was."
    return read_state(folder / RESCUE_FILE, _rescue, remedy)


def _rescue(content: dict[str, Any]) -> Rescue:
    if content.pop("checksum", None) not in (None, _checksum(content)):
        raise ValueError("its checksum does not match its content")
    return Rescue(**content)


def _checksum(content: dict[str, Any]) -> str:
    return f"crc32 {zlib.crc32(json.dumps(content).encode()):08x}"


def of_run(config: DictConfig) -> Rescue | None:
    """Return the rescue that continues a run; None for a run without one, and for the rescue itself."""
    if OmegaConf.select(config, ON_ALARM) != "rescue":
        return None
    return read_rescue(Path(config.trainer.default_local_dir).absolute())


def is_rescue(config: DictConfig) -> bool:
    """Return whether a run is a rescue."""
    folder = Path(OmegaConf.select(config, "trainer.default_local_dir") or ".").absolute()
    found = read_rescue(folder)
    return found is not None and found.folder == str(folder)


def arguments(given: Sequence[str], rescue: Rescue, chosen: Sequence[str]) -> list[str]:
    """Return a driver's arguments, changed to those of the rescue; Hydra refuses a setting that occurs twice.

    `chosen` are the config groups that the parent's config has already; a preset of another group needs a `+`.
    """
    settings = {"trainer.experiment_name": rescue.name, "trainer.default_local_dir": rescue.folder}
    settings |= {ON_ALARM: "log", "trainer.resume_mode": "auto"}
    if rescue.checkpoint is not None and not checkpoints_in(Path(rescue.folder)):  # otherwise: its own newest
        settings |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": rescue.checkpoint}
    left = [each for each in given if re.sub(r"^[+~]+", "", each.partition("=")[0]) not in ("precision", *settings)]
    preset = f"{'' if 'precision' in chosen else '+'}precision={rescue.precision}"
    return [*left, preset, *(f"++{key}={quoted(value)}" for key, value in settings.items())]


def go_on(config: DictConfig, chosen: Sequence[str]) -> None:
    """Replace the driver of a rescued run, at its start or its end, with the driver of the rescue."""
    if (rescue := of_run(config)) is None:
        return
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    main = getattr(sys.modules["__main__"], "__spec__", None)
    script = ["-m", main.name] if main is not None else sys.argv[:1]
    words = [sys.executable, *script, *arguments(sys.argv[1:], rescue, chosen)]
    logger.warning(
        "ACTION rescue: %s at step %d, since step %d. The run resumes from %s in FP16, in the folder %s",
        *(rescue.alarm, rescue.step, rescue.since_step, rescue.checkpoint or "the start", rescue.folder),
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, words)
