"""The settings that make a run another one, those of them that are not at their default, and its files' content.

Two runs are the same where each setting that both know is equal, and one that only one of them knows has its default:
verl and this package may get new settings between two starts. A default is that of verl's own `ppo_trainer`, or of the
class that a block's `_target_` names; a setting without a known one has null for it.
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
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from pydantic.fields import FieldInfo

from verl_precision.base.content import content_digest, weight_files
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.state import STRICT

_KNOWN = table_of(__file__)
IDENTITY_BLOCKS, IDENTITY_TRAINER_KEYS = _KNOWN["blocks"], _KNOWN["trainer"]
IGNORED_SETTINGS = frozenset(_KNOWN["ignored"])
_TRAINER_MODE = "trainer.v1.trainer_mode"
_NOT_SET: tuple[Any, ...] = (None, [])
_SCRATCH = "default_of_a_setting"


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class RunSettings:
    """A run, as its config has it or as its folder's record does.

    The digest is written last: where a record was cut short, it is missing or no digest.

    Attributes:
        settings: Every setting that counts, resolved, by its full name.
        chosen: Those that have not their default.
        content: Digest of the files that a setting names, where they are on this machine.
        replaced_by_presets: The words of the command that presets have replaced, for people: presets=win.
        digest: Eight digits of what is chosen and of the local files' content, for the folder's name.
    """

    settings: dict[str, Any]
    chosen: list[str]
    content: dict[str, str]
    replaced_by_presets: Any = None
    digest: str = pydantic.Field(pattern=r"^[0-9a-f]{8}$")

    @classmethod
    def from_config(cls, config: DictConfig) -> "RunSettings":
        """Return the settings that make a run.

        Raises:
            ConfigurationError: If files that it names cannot be read, or a `_target_` cannot be imported.
        """
        parts = _parts(config, resolve=True)
        settings, written = _same_names(_plain(_flat(parts))), dict(_flat(_parts(config, resolve=False)))
        defaults = _same_names(_defaults(config, parts))
        content = {name: digest for name, value in settings.items() if (digest := _content(name, value)) is not None}
        local = {name for name in content if all(_local(path).exists() for path in _paths(settings[name]))}
        chosen = local.union(_chosen(config, settings, written, defaults))
        named = {name: content[name] if name in local else settings[name] for name in chosen}
        replaced = OmegaConf.select(config, "presets.replaced")
        return cls(
            settings=dict(sorted(settings.items())),
            chosen=sorted(chosen),
            content=dict(sorted(content.items())),
            replaced_by_presets=OmegaConf.to_container(replaced) if replaced else None,
            digest=hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:8],
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "RunSettings":
        """Return the run of a record of `run_identity`, but for settings that are ignored today.

        Raises:
            TypeError, ValueError: If it is none.
        """
        read = cls(**record)
        if lost := {*read.chosen, *read.content} - read.settings.keys():
            raise ValueError(f"it has no setting {min(lost)}, which it names")
        settings = {k: v for k, v in read.settings.items() if IGNORED_SETTINGS.isdisjoint(k.split("."))}
        chosen = [name for name in read.chosen if name in settings]
        return dataclasses.replace(read, settings=settings, chosen=chosen)

    def as_record(self) -> dict[str, Any]:
        """Return plain values, for `from_record`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def changed_settings(old: RunSettings, new: RunSettings) -> list[str]:
    """Return the names of the settings by which a run that is to start is another than a recorded one."""
    return [name for name in sorted({*old.settings, *new.settings}) if not _same(name, old, new)]


def differences(old: RunSettings, new: RunSettings) -> str:
    """Say in which settings, of at most five, the run that is to start is another one; empty where it is the same."""
    changed, most = changed_settings(old, new), 5
    said: list[str] = []
    for name in changed[:most]:
        was, now = (run.settings.get(name, "not set") for run in (old, new))
        change = f" was {was!r}, is {now!r}" if was != now else f"={now!r} has another content than it had"
        said.append(name + change)
    return "; ".join(said + [f"and {len(changed) - most} more"] * (len(changed) > most))


def _same(name: str, old: RunSettings, new: RunSettings) -> bool:
    if name in old.settings and name in new.settings:
        if name in old.content and name in new.content:
            return old.content[name] == new.content[name]
        return old.settings[name] == new.settings[name]
    return name not in (new if name in new.settings else old).chosen


def _same_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with verl's name of the trainer: the one that measures is alike."""
    same = {name: str(settings[name]).removeprefix("vp_") for name in (_TRAINER_MODE,) if name in settings}
    return {**settings, **same}


def _parts(config: DictConfig, resolve: bool) -> dict[str, Any]:
    """Return what decides how a run learns; unresolved, an interpolation is its own text."""

    def chosen(node: DictConfig, names: Iterable[str]) -> dict[str, Any]:
        found = {name: node[name] for name in names if name in node}
        is_config, plain = OmegaConf.is_config, OmegaConf.to_container
        return {name: plain(value, resolve=resolve) if is_config(value) else value for name, value in found.items()}

    return {**chosen(config, IDENTITY_BLOCKS), "trainer": chosen(config.trainer, IDENTITY_TRAINER_KEYS)}


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for name, value in node.items():
        if name not in IGNORED_SETTINGS:
            yield from _flat(value, f"{path}.{name}" if path else str(name))


def _plain(settings: Any) -> dict[str, Any]:
    """Return flat settings of plain types, as they will be read back; a whole number as an integer: 1.0 is 1."""
    number = lambda text: int(value) if (value := float(text)).is_integer() else value  # noqa: E731
    return json.loads(json.dumps(dict(settings), default=str), parse_float=number)


def _defaults(config: DictConfig, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the default of each setting that has a known one: in verl's YAML, else in the class that it belongs to."""
    of_classes = reversed(list(_class_defaults(parts)))  # an outer class decides what it puts into its blocks
    return {**_plain(of_classes), **_defaults_of_verl(config.get("model_engine", "dp"))}


@functools.cache
def _defaults_of_verl(engine: str) -> dict[str, Any]:
    """Return verl's `ppo_trainer` as verl itself has flattened it; a test compares it with what Hydra composes."""
    file = "_generated_ppo_trainer.yaml" if engine == "dp" else f"_generated_ppo_{engine}_trainer.yaml"
    composed = OmegaConf.create(resources.files("verl.trainer.config").joinpath(file).read_text())
    return _plain(_flat(_parts(composed, resolve=False)))


def _class_defaults(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        if target := node.get("_target_"):
            yield from _flat(_fields(_imported(target, path)), path)
        for name, value in node.items():
            if name not in IGNORED_SETTINGS:
                yield from _class_defaults(value, f"{path}.{name}" if path else str(name))


def _imported(target: str, path: str) -> Any:
    try:
        return get_object(target)
    except (ImportError, ValueError) as error:
        problem = f"it cannot be imported ({' '.join(str(error).split())})"
        allowed = "the full name of a class that is installed"
        raise ConfigurationError(problem, setting=f"{path}._target_", value=target, allowed=allowed) from error


def _fields(kind: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass, its blocks included; of another class none is known."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        block = field.default_factory
        if dataclasses.is_dataclass(block):
            name = getattr(block, "__qualname__", "")
            found[field.name] = {**_fields(block), "_target_": f"{block.__module__}.{name}"}
        elif block is not dataclasses.MISSING:
            found[field.name] = block()
        elif field.default is not dataclasses.MISSING:
            is_pydantics = isinstance(field.default, FieldInfo)
            found[field.name] = field.default.default if is_pydantics else field.default
    return found


def _chosen(
    config: DictConfig, settings: Mapping[str, Any], written: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings that have another value than their default has in this config."""
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
    key, paths = name.rpartition(".")[2], _paths(value)
    if not paths or not (key in ("path", "train_files") or key.endswith("_path")):
        return None
    try:
        found = [_files(path) for path in paths]
        files = [file for each in found if each is not None for file in each]
        return None if None in found else content_digest(files)
    except (OSError, ValueError, KeyError) as error:
        problem = f"a file that it names cannot be read ({type(error).__name__}: {error})"
        remedy = "Mend the file, or name another one: a run with another content is another run."
        raise ConfigurationError(problem, setting=name, value=value, remedy=remedy) from error


def _paths(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value]) if each]


def _local(path: str) -> Path:
    return Path(os.path.expanduser(path.removeprefix("file://")))


def _files(path: str) -> list[Path] | None:
    """Return the files at a path: a file, a model's weights, any other folder's files, or a cached model of the hub."""
    place = _local(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        return weight_files(place) or sorted(file for file in place.iterdir() if file.is_file())
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # no name of the hub; if it should be a file, a rule says that it is missing
        return None
    return weight_files(Path(cached).parent) if isinstance(cached, str) else None
