"""The identity of a run: its settings and file contents. A folder belongs to one run, and to one process at a time.

verl resumes from whatever lies in `trainer.default_local_dir`: a run with a changed learning rate goes on from the old
one's checkpoint. Where a recipe's name is `${verl_precision.run_name:}`, the name gets a digest of the settings, so
that a changed command starts in a new folder. A folder of another run is refused, with the differing settings. A folder
that another process owns is refused too (`base/owner.py`).

Two runs are the same if each setting that both have is equal, and each setting that only one has is at its default:
verl may get new settings between two starts. The default is that of verl's `ppo_trainer`, or null if it has none.

Only the driver can know this: verl changes its config after the start, and Ray's workers resolve it again.
"""

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pydantic
import yaml
from omegaconf import DictConfig, OmegaConf

from verl_precision.base import owner
from verl_precision.base.content import content_digest, weight_files
from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.base.files import table_of, write_file
from verl_precision.base.loggers import general as logger
from verl_precision.base.state import STRICT, read_state
from verl_precision.base.verl_config import content_of, leaves
from verl_precision.integration.trainer.checkpoints import RESCUE_FILE
from verl_precision.integration.trainer.metrics_file import metrics_path
from verl_precision.integration.trainer.saving import saves

RUN_FILE = "run.yaml"
RUN_NAME_RESOLVER = "${verl_precision.run_name:}"  # as recipes write it
_FOLDER = "trainer.default_local_dir"
_WORDS = table_of(__file__)
_KNOWN = table_of(__file__, "run_settings.yaml")
IDENTITY_BLOCKS, IDENTITY_TRAINER_KEYS = _KNOWN["blocks"], _KNOWN["trainer"]
IGNORED_SETTINGS = frozenset(_KNOWN["ignored"])
_TRAINER_MODE = "trainer.v1.trainer_mode"
_NOT_SET: tuple[Any, ...] = (None, [])
_SCRATCH = "default_of_a_setting"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSettings:
    """The settings of a run, from its config or from its folder's record."""

    settings: dict[str, Any]  # every setting that counts, resolved, by its full name
    chosen: list[str]  # the settings that are not at their default
    content: dict[str, str]  # setting -> digest of the files that it names, if they are here
    replaced_by_presets: Any = None  # words that presets=win has replaced, for a reader
    # Of the chosen settings, for the folder's name. Written last: in a record that was cut short it is invalid.
    digest: str = pydantic.Field(pattern=r"^[0-9a-f]{8}$")

    @classmethod
    def from_config(cls, config: DictConfig) -> "RunSettings":
        """Return the settings that identify a run; raise `ConfigurationError` if a file of a setting cannot be read."""
        settings = _same_names(_plain(_flat(_parts(config, resolve=True))))
        content = {name: digest for name, value in settings.items() if (digest := _content(name, value)) is not None}
        chosen = {*content, *_chosen(config, settings)}
        named = {name: content.get(name, settings[name]) for name in chosen}
        return cls(
            settings=dict(sorted(settings.items())),
            chosen=sorted(chosen),
            content=dict(sorted(content.items())),
            replaced_by_presets=content_of(OmegaConf.select(config, "presets.replaced"), resolve=False) or None,
            digest=hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:8],
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RunSettings":
        """Return the settings from the record in a run's folder."""
        read = cls(**record)
        if lost := {*read.chosen, *read.content} - read.settings.keys():
            raise ValueError(f"this config has no setting {min(lost)}, which the file names")
        return read

    def as_record(self) -> dict[str, Any]:
        """Return plain values, for `from_record`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def changed_settings(old: RunSettings, new: RunSettings) -> list[str]:
    """Return the names of the settings in which a new run differs from a recorded run."""
    return [name for name in sorted({*old.settings, *new.settings}) if not _same(name, old, new)]


def differences(old: RunSettings, new: RunSettings) -> str:
    """Return, as text, up to five settings in which a new run differs from a recorded run; empty if none does."""
    changed, most = changed_settings(old, new), 5
    said: list[str] = []
    for name in changed[:most]:
        was, now = (run.settings.get(name, "not set") for run in (old, new))
        change = f" was {was!r}, is {now!r}" if was != now else f"={now!r} has changed its content"
        said.append(name + change)
    return "; ".join(said + [f"and {len(changed) - most} more"] * (len(changed) > most))


def _same(name: str, old: RunSettings, new: RunSettings) -> bool:
    if name in old.settings and name in new.settings:
        if name in old.content and name in new.content:
            return old.content[name] == new.content[name]
        return old.settings[name] == new.settings[name]
    return name not in (new if name in new.settings else old).chosen


def _same_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with verl's name of the trainer: a measuring trainer makes no other run."""
    same = {name: str(settings[name]).removeprefix("vp_") for name in (_TRAINER_MODE,) if name in settings}
    return {**settings, **same}


def _parts(config: DictConfig, resolve: bool) -> dict[str, Any]:
    """Return the settings that decide how a run learns; unresolved, an interpolation stays text."""

    def chosen(node: DictConfig, names: Iterable[str]) -> dict[str, Any]:
        return {name: content_of(node[name], resolve) for name in names if name in node}

    return {**chosen(config, IDENTITY_BLOCKS), "trainer": chosen(config.trainer, IDENTITY_TRAINER_KEYS)}


def _flat(node: Any) -> dict[str, Any]:
    return {name: x for name, x in leaves(node) if x != {} and IGNORED_SETTINGS.isdisjoint(name.split("."))}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings of plain types, as they will be read back; a whole number as an integer: 1.0 is 1."""
    number = lambda text: int(value) if (value := float(text)).is_integer() else value  # noqa: E731
    return json.loads(json.dumps(settings, default=str), parse_float=number)


@functools.cache
def _defaults_of_verl(engine: str) -> dict[str, Any]:
    """Return `ppo_trainer` from verl's own flattened file; a test compares it with Hydra's composition."""
    file = "_generated_ppo_trainer.yaml" if engine == "dp" else f"_generated_ppo_{engine}_trainer.yaml"
    composed = OmegaConf.create(resources.files("verl.trainer.config").joinpath(file).read_text())
    return _plain(_flat(_parts(composed, resolve=False)))


def _chosen(config: DictConfig, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings whose value differs from their default in this config."""
    written = _flat(_parts(config, resolve=False))
    defaults = _same_names(_defaults_of_verl(config.get("model_engine", "dp")))
    probe = copy.deepcopy(config)
    OmegaConf.set_struct(probe, False)
    for name, value in settings.items():
        paths = itertools.accumulate(name.split("."), "{}.{}".format)
        origin = next((each for each in paths if isinstance(text := defaults.get(each), str) and "${" in text), "")
        default = defaults.get(origin or name)
        if origin and written.get(origin) == default:
            continue  # derived from other settings, as in verl's YAML
        if origin:
            OmegaConf.update(probe, _SCRATCH, default)
            default = OmegaConf.select(probe, _SCRATCH + name.removeprefix(origin))
        if value != default and not (default is None and value in _NOT_SET):
            yield name


def _content(name: str, value: Any) -> str | None:
    """Return the digest of the files that a setting names; None: it names none, or one that is not on this machine."""
    key = name.rpartition(".")[2]
    paths = [str(each) for each in (value if isinstance(value, list) else [value]) if each]
    places = [Path(os.path.expanduser(path.removeprefix("file://"))) for path in paths]
    if not places or not (key in ("path", "train_files") or key.endswith("_path")):
        return None
    try:
        there = all(place.exists() for place in places)
        return content_digest([file for place in places for file in _files(place)]) if there else None
    except (OSError, ValueError, KeyError) as error:
        problem = f"a file that it names cannot be read ({type(error).__name__}: {error})"
        remedy = "Restore the file, or name another one. A file with other content makes a new run."
        raise ConfigurationError(problem, setting=name, value=value, remedy=remedy) from error


def _files(place: Path) -> list[Path]:
    """Return the files at a place: a file, a model's weights, or any other folder's files."""
    if place.is_file():
        return [place]
    return weight_files(place) or sorted(file for file in place.iterdir() if file.is_file())


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
