"""The identity of a run. A folder belongs to one run, and to one process at a time.

verl resumes from whatever lies in `trainer.default_local_dir`: a run with a changed learning rate goes on from the old
one's checkpoint. Where a recipe's name is `${verl_precision.run_name:}`, the name gets a digest of the settings, so
that a changed command starts in a new folder. A folder of another run is refused, with the differing settings. A folder
that another process owns is refused too (`base/owner.py`).

Only the driver can know this: verl changes its config after the start, and Ray's workers resolve it again.
"""

import logging
import os
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_precision.base import owner
from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.base.files import table_of, write_file
from verl_precision.base.state import read_state
from verl_precision.integration.trainer.checkpoints import RESCUE_FILE
from verl_precision.integration.trainer.metrics_file import metrics_path
from verl_precision.integration.trainer.run_settings import RunSettings, differences
from verl_precision.integration.trainer.saving import saves

RUN_FILE = "run.yaml"
RUN_NAME_RESOLVER = "${verl_precision.run_name:}"  # as recipes write it
_FOLDER = "trainer.default_local_dir"
_WORDS = table_of(__file__)

logger = logging.getLogger("verl_precision")


def name_the_run(config: DictConfig) -> None:
    """Append a digest of the settings to the run's name if this package makes the name; before a setting is changed."""
    if RUN_NAME_RESOLVER in str(OmegaConf.to_container(config.trainer)["experiment_name"]):
        config.trainer.experiment_name += f"-{RunSettings.from_config(config).digest}"


def claim_folder(config: DictConfig) -> None:
    """Lock the run's folder until this process ends, and write the run's settings into it; on failure change nothing.

    A run that saves nothing has no such folder. It locks its metrics file, which a second start would empty. The lock
    is in a folder of the same name beside that file (with `recipes/launch/run.sh`, the folder of the checkpoints).
    """
    folder, run = Path(config.trainer.default_local_dir), RunSettings.from_config(config)
    known, on_alarm = _require_same(config, folder, run), OmegaConf.select(config, "mismatch.alarm.on_alarm")
    writes = saves(config) or on_alarm in ("stop", "rescue") or (folder / RESCUE_FILE).exists()
    if known is None and not (writes or any(folder.glob("global_step_*"))):
        if "file" in (config.trainer.logger or ()):
            names = config.trainer.project_name, config.trainer.experiment_name
            _own(metrics_path(*names).with_suffix(""), "trainer.experiment_name", names[1])
        return
    if known is None and _may_be_a_later_start() and not (folder / RESCUE_FILE).exists():
        _require_first_start(folder, run)
    _own(folder, _FOLDER, str(folder))
    if _require_same(config, folder, run) is None:  # another start at this moment may have been first
        logger.info("a new run, in %s", folder)
        write_file(folder / RUN_FILE, yaml.safe_dump(run.as_record(), sort_keys=False))


def _require_same(config: DictConfig, folder: Path, run: RunSettings) -> RunSettings | None:
    """Return the run that a folder belongs to, or None; refuse a folder of another run."""
    known = run_in(folder)
    if known is not None and (changed := differences(known, run)):
        words = filled(_WORDS["other settings"], changed=changed, name=config.trainer.experiment_name, folder=folder)
        raise ConfigurationError(setting=_FOLDER, value=str(folder), **words)
    return known


def run_in(folder: Path) -> RunSettings | None:
    """Return the run that a folder belongs to, or None if it has no record."""
    return read_state(folder / RUN_FILE, RunSettings.from_record, _WORDS["unreadable"])


def _may_be_a_later_start() -> bool:
    """Return whether Slurm has queued this job again, or the job is one that makes a single run."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0 or owner.JOB_ID in os.environ


def _require_first_start(folder: Path, run: RunSettings) -> None:
    """Refuse a new folder for a job that was queued again, if the job's earlier start has a folder beside it."""
    job = owner.this_job()
    for place in sorted(path.parent for path in folder.parent.glob(f"*/{RUN_FILE}")):
        if job in {each.job for each in owner.owners(place)} and (known := run_in(place)) is not None:
            changed = differences(known, run) or "the same settings under another name"
            words = filled(_WORDS["later start"], job=job, earlier=place, changed=changed)
            raise ConfigurationError(setting=_FOLDER, value=str(folder), **words)


def _own(folder: Path, setting: str, value: str) -> None:
    """Lock a folder; wait if an earlier start of this job, whose host was lost, still holds the lock."""
    holder = owner.take(folder)
    if holder is None or owner.owned_here(folder):
        return
    if _may_be_a_later_start() and holder.job == owner.this_job():
        logger.warning("%s is still locked; an earlier start of this job holds it: %s", folder, holder)
        holder = owner.take(folder, owner.LEASE_SECONDS)
    if holder is not None:
        words = filled(_WORDS["at work"], folder=folder, holder=holder)
        raise ConfigurationError(setting=setting, value=value, **words)
