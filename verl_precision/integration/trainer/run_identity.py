"""Which run is this, and who may run it? A folder belongs to one run, and at a time to one process.

verl resumes from whatever lies in `trainer.default_local_dir`: a run with a changed learning rate goes on from the old
one's checkpoint. Where a recipe's name is `${verl_precision.run_name:}`, the name gets a digest of the settings, so
that a changed command starts in a new folder; the same command finds the folder whose `run.yaml` has the same settings
(`run_settings.py`), under whatever digest an earlier version gave it. A folder of another run is refused, with the
differing settings, and so is one that another process owns (`base/owner.py`).

Only the driver can know this: verl changes its config after the start, and Ray's workers resolve it again.
"""

import dataclasses
import glob
import logging
import os
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_precision.base import owner
from verl_precision.base.errors import CheckpointStateError, ConfigurationError, filled
from verl_precision.base.files import table_of, write_file
from verl_precision.base.state import read_state
from verl_precision.integration.trainer.checkpoints import RESCUE_FILE
from verl_precision.integration.trainer.metrics_file import metrics_path
from verl_precision.integration.trainer.run_settings import (
    RunSettings,
    changed_settings,
    differences,
)
from verl_precision.integration.trainer.saving import saves

RUN_FILE = "run.yaml"
RUN_NAME_RESOLVER = "${verl_precision.run_name:}"  # as recipes write it
_DIGEST = "-" + "[0-9a-f]" * 8  # behind the name, as a pattern
_FOLDER = "trainer.default_local_dir"
_WORDS = table_of(__file__)

logger = logging.getLogger("verl_precision")


def name_the_run(config: DictConfig) -> None:
    """Put a digest of the settings behind the name, where the name is this package's; before anybody changes them.

    It is the one that the run has already, if a folder of that name is there with the same settings.
    """
    if RUN_NAME_RESOLVER not in str(OmegaConf.to_container(config.trainer)["experiment_name"]):
        return
    run, name = RunSettings.from_config(config), config.trainer.experiment_name
    config.trainer.experiment_name = f"{name}-{run.digest}"
    folder = Path(config.trainer.default_local_dir)
    named_after_it = folder.name == config.trainer.experiment_name
    if named_after_it and folder.exists():
        return
    for place in sorted(folder.parent.glob(glob.escape(name) + _DIGEST)) if named_after_it else [folder]:
        known = run_in(place)
        if known is not None and not changed_settings(known, run):
            config.trainer.experiment_name = place.name if named_after_it else f"{name}-{known.digest}"
            return


def claim_folder(config: DictConfig) -> None:
    """Own the run's folder until this process ends, and write down whose it is; leave all as it was where that fails.

    A run that saves nothing has no such folder. It owns its metrics file, which a second start would empty: the lock is
    in the folder beside that file, of the same name (of `recipes/launch/run.sh`, the folder of the checkpoints).

    This process is the driver, which waits for verl's task runner. If the driver is killed, Ray ends the actors of its
    job soon after; in those seconds nothing but Ray itself keeps them from the folder.

    Raises:
        ConfigurationError: If the folder has the checkpoints of a run with other settings; if another process owns it;
            or if a job that Slurm has queued again would begin a new one.
    """
    folder, run = Path(config.trainer.default_local_dir), RunSettings.from_config(config)
    known, on_alarm = _require_same(config, folder, run), OmegaConf.select(config, "mismatch.alarm.on_alarm")
    writes = saves(config) or on_alarm in ("stop", "rescue") or (folder / RESCUE_FILE).exists()
    if known is None and not (writes or any(folder.glob("global_step_*"))):
        if "file" in (config.trainer.logger or ()):
            names = config.trainer.project_name, config.trainer.experiment_name
            _own(metrics_path(*names).with_suffix(""), "trainer.experiment_name", names[1])
        return
    beside = {} if known is not None or (folder / RESCUE_FILE).exists() else _runs_beside(folder)
    _require_first_start(folder, run, beside)
    _own(folder, _FOLDER, str(folder))
    known = _require_same(config, folder, run)  # a start of the same moment may have been first
    if known is None:
        if beside:
            logger.info("a new run, in %s. It is not the one in %s: %s", folder, *_nearest(beside, run))
        write_file(folder / RUN_FILE, yaml.safe_dump(run.as_record(), sort_keys=False))
    elif run.content.items() - known.content.items():  # before a model was downloaded
        grown = dataclasses.replace(known, content={**known.content, **run.content})
        write_file(folder / RUN_FILE, yaml.safe_dump(grown.as_record(), sort_keys=False), replace=True)


def _require_same(config: DictConfig, folder: Path, run: RunSettings) -> RunSettings | None:
    """Return the run that a folder belongs to, if to any; refuse another one than this."""
    known = run_in(folder)
    if known is not None and (changed := differences(known, run)):
        words = filled(_WORDS["other settings"], changed=changed, name=config.trainer.experiment_name, folder=folder)
        raise ConfigurationError(setting=_FOLDER, value=str(folder), **words)
    return known


def run_in(folder: Path) -> RunSettings | None:
    """Return the run that a folder belongs to, or None where it says nothing."""
    return read_state(folder / RUN_FILE, RunSettings.from_record, _WORDS["unreadable"])


def _runs_beside(folder: Path) -> dict[Path, RunSettings]:
    """Return the runs beside a folder; one that cannot be read is passed over, but by a job that may be one of them."""
    found = dict[Path, RunSettings]()
    for place in sorted({path.parent for path in folder.parent.glob(f"*/{RUN_FILE}")} - {folder}):
        try:
            known = run_in(place)
        except CheckpointStateError as error:
            if _may_be_a_later_start():
                raise
            logger.warning("a run beside this one is passed over: %s", error.problem)
        else:
            found |= {} if known is None else {place: known}
    return found


def _nearest(beside: dict[Path, RunSettings], run: RunSettings) -> tuple[Path, str]:
    """Return the folder of the run that differs least, and what differs: perhaps that one was to go on."""
    nearest = min(beside, key=lambda place: len(changed_settings(beside[place], run)))
    return nearest, differences(beside[nearest], run) or "the same settings under another name"


def _may_be_a_later_start() -> bool:
    """Return whether Slurm has queued this job again, or the job is one that makes a single run."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0 or owner.JOB_ID in os.environ


def _require_first_start(folder: Path, run: RunSettings, beside: dict[Path, RunSettings]) -> None:
    """Refuse a new folder to a job that was queued again and has, or may have, one beside it with other settings.

    A start that ended before it had a folder left none: where each folder beside is another job's, the next one begins.
    A job that makes a single run has had a start where one of the folders is its own.
    """
    job, unknown = owner.this_job(), owner.JOB_ID not in os.environ
    jobs = {place: {each.job for each in owner.owners(place)} for place in (beside if _may_be_a_later_start() else ())}
    if own := {p: beside[p] for p in jobs if job in jobs[p] or unknown and (not jobs[p] or None in jobs[p])}:
        nearest, changed = _nearest(own, run)
        words = filled(_WORDS["later start"], job=job, nearest=nearest, changed=changed)
        raise ConfigurationError(setting=_FOLDER, value=str(folder), **words)


def _own(folder: Path, setting: str, value: str) -> None:
    """Own a folder; the earlier start of this job may still be written down where its host was lost (base/owner.py)."""
    holder = owner.take(folder)
    if holder is None or owner.owned_here(folder):
        return
    if _may_be_a_later_start() and holder.job == owner.this_job():
        logger.warning("%s is still locked by an earlier start of this job: %s", folder, holder)
        holder = owner.take(folder, owner.LEASE_SECONDS)
    if holder is not None:
        words = filled(_WORDS["at work"], folder=folder, holder=holder)
        raise ConfigurationError(setting=setting, value=value, **words)
