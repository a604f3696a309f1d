"""The origin of each setting: verl, a recipe, a preset, or a word of the command; with `presets=win`, presets win.

A composed config does not know where its values come from. Hydra's own node in the config has the sources, the choices
and the command's words. With these Hydra lists the same files again, in the order in which it merges them.

The words of a command win over every file, presets too. Public scripts write their estimator's settings in the command.
Such words replace most of `estimator=pg_seq_is`, and Hydra gives no message.
"""

import copy
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.verl_config import content_of, leaves
from verl_precision.integration.ledger import lost_symbols, require_feature
from verl_precision.presets import preset_groups

WINNING = "presets=win"  # the feature of the ledger that origins need
_VERLS = re.compile(r"verl[/.](trainer|experimental)[/.]|(^|/)hydra\.conf")  # places of files that no user wrote
_OURS = ("pkg://verl_precision.presets", "structured://")  # where presets are, if one is chosen
WIN = "presets.win"  # True: presets win. False: words win on purpose. Absent: words win, and that is a finding
REPLACED = "presets.replaced"
# Settings of the weight-sync guard and of the engine: never mere options, in any file of a preset.
GUARD = re.compile(r"\.worker_extension_cls$|\.send_weight_manifest$|fsdp(_config)?\._target_$")
# Settings for which a precision merely offers a value; other rules check them.
_OPTIONS = re.compile(r"\.loss_scale\.|\.attn_implementation$")
_LONGEST = 80  # characters of a word in a message


@dataclass(frozen=True)
class Origin:
    """The last source of a setting before the command: a preset, or a file that is neither verl's nor a preset's."""

    who: str  # estimator=pg_seq_is, or the name of the file
    value: Any  # as it is written there: an interpolation is its own text
    group: str = ""  # of the preset, e.g. estimator; empty for a file
    offered: bool = False  # whether the file is in parts/: an option with its default


@dataclass(frozen=True)
class Decisions:
    """The sources of a config's settings other than verl itself, and the words of the command."""

    origins: Mapping[str, Origin]  # by the setting's full name
    words: tuple[tuple[str, str], ...]  # setting and whole word of the command, in its order

    def word_about(self, setting: str) -> tuple[str, str] | None:
        """Return the last word of the command about a setting, about its block, or about something below it."""
        return next((word for word in reversed(self.words) if is_about(word[0], setting)), None)


def is_about(key: str, setting: str) -> bool:
    """Return whether a word with this key changes a setting, its block, or something below it."""
    return key == setting or setting.startswith(f"{key}.") or key.startswith(f"{setting}.")


def decisions(config: DictConfig) -> Decisions:
    """Return the sources of a composed config's settings; empty for a config without Hydra's own node."""
    name = OmegaConf.select(config, "hydra.job.config_name")
    if name is None:
        return Decisions({}, ())
    hydra = config.hydra
    sources = tuple((each.provider, f"{each.schema}://{each.path}") for each in hydra.runtime.config_sources)
    words = words_of(config)
    groups = [word for word in hydra.overrides.task if word not in {whole for _, whole in words}]
    return Decisions(_origins(sources, name, (*hydra.overrides.hydra, *groups)), words)


def words_of(config: DictConfig) -> tuple[tuple[str, str], ...]:
    """Return setting and whole word for each word of the command that chooses no group."""
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    given = OmegaConf.select(config, "hydra.overrides.task") or ()
    keys = {word: word.lstrip("+~").partition("=")[0] for word in given}
    return tuple((key, word) for word, key in keys.items() if "@" not in key and key not in choices)


@functools.lru_cache(maxsize=256)
def _origins(sources: tuple[tuple[str, str], ...], name: str, words: tuple[str, ...]) -> Mapping[str, Origin]:
    """Return each setting's source, from a search path, the primary config's name, and words that choose groups."""
    users = [place for _, place in sources if place not in _OURS and not _VERLS.search(place)]
    if not users and all(word.startswith("hydra.") for word in words):
        return {}  # neither a user's file nor a preset
    if lost_symbols(WINNING):
        return {}  # Hydra's loader is not as tested
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    searched = ConfigSearchPathImpl()
    for provider, place in sources:
        searched.append(provider, place)
    loader = ConfigLoaderImpl(searched)
    merged = loader.compute_defaults_list(name, list(words), RunMode.RUN).defaults
    parents = {each.config_path: each.parent for each in merged}
    origins: dict[str, Origin] = {}
    for each in merged:
        path = str(each.config_path)
        source = next(source for source in loader.get_sources() if source.is_config(path))
        if _VERLS.search(source.path):
            continue
        content: Any = OmegaConf.to_container(loader.repository.load_config(path).config, resolve=False)
        preset = _chosen(path, each.parent, parents)
        for setting, value in leaves(content, each.package or ""):
            origin = Origin("=".join(preset), value, preset[0], path.startswith("parts/")) if preset else None
            origins[setting] = _stronger(origins.get(setting), origin) if origin else Origin(f"{path}.yaml", value)
    return origins


def _chosen(path: str, parent: str | None, parents: Mapping[str | None, str | None]) -> tuple[str, str] | None:
    """Return group and name of the preset that includes a file, or None."""
    chosen, at = None, str(path) or None
    while at is not None:
        group, _, name = at.partition("/")
        if group in preset_groups():
            chosen = group, name
        elif group != "parts":
            break
        at, parent = parent, parents.get(parent)
    return chosen


def _stronger(known: Origin | None, later: Origin) -> Origin:
    """Return the later origin, which Hydra takes; of two equal values prefer one that is no option and no scale."""
    same = known is not None and known.group and known.value == later.value
    return known if known is not None and same and (later.offered or later.group == "scale") else later


def shown(word: str) -> str:
    """Return a word of the command, shortened for a sentence."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


@dataclass(frozen=True)
class WinningWord:
    """A word of the command about a setting of a preset, with another value than the preset's."""

    word: str  # as it was given
    setting: str
    value: Any  # the value in force
    preset: str  # e.g. estimator=pg_seq_is
    wanted: Any  # the preset's value
    written: Any  # the same, unresolved
    option: bool  # whether the preset only offers a value, which users change on purpose

    @property
    def contradicts(self) -> bool:
        """Whether the word contradicts the preset that the command chooses.

        A scale is a starting point: every recipe's run changes batch sizes, GPUs, paths or saving. Other rules check
        that the run fits the machine. Words over a scale stay in force, and only `--json` shows them.
        """
        return not self.option and not (self.preset.startswith("scale=") and not GUARD.search(self.setting))


def winning_words(config: DictConfig) -> list[WinningWord]:
    """Return every word of the command that wins over a chosen preset, in the presets' order."""
    if not words_of(config):
        return []
    said, found, trial = decisions(config), [], None
    for setting, origin in said.origins.items():
        about = said.word_about(setting) if origin.group else None
        if about is None or setting.startswith("hydra.") or _is_moved(config, setting):
            continue
        value, wanted = content_of(OmegaConf.select(config, setting)), origin.value
        if "${" in str(wanted):
            trial = copy.deepcopy(config) if trial is None else trial
            _put(trial, setting, wanted)
            wanted = content_of(OmegaConf.select(trial, setting))
        if not is_same(setting, value, wanted):
            option = not GUARD.search(setting) and is_option(setting, origin)
            found.append(WinningWord(about[1], setting, value, origin.who, wanted, origin.value, option))
    return found


def is_option(setting: str, origin: Origin) -> bool:
    """Return whether a preset merely offers a value for a setting."""
    return (origin.offered and origin.group != "scale") or bool(_OPTIONS.search(setting))


def _is_moved(config: DictConfig, setting: str) -> bool:
    """Return whether `fit_to_engine` has moved a setting's block to another engine, whose rules check it."""
    block = re.match(r"(.*(?:\.fsdp_config|critic\.fsdp))\.", setting)
    return block is not None and OmegaConf.select(config, block[1]) is None


def _put(config: DictConfig, setting: str, value: Any) -> None:
    OmegaConf.update(config, setting, copy.deepcopy(value), merge=False, force_add=True)


def is_same(setting: str, one: Any, other: Any) -> bool:
    """Return whether two values of a setting mean the same to verl."""
    if setting.endswith("dtype") and isinstance(one, str) and isinstance(other, str):
        return short(one) == short(other)
    off = (one is None or one is False) and (other is None or other is False)
    return off or one == other  # to verl, null means off


def put_presets_over_words(config: DictConfig) -> list[WinningWord]:
    """Replace the values of words that contradict presets by the presets' values; return these words."""
    replaced = [each for each in winning_words(config) if each.contradicts]
    for each in replaced:
        _put(config, each.setting, each.written)
    return replaced


def let_presets_win(config: DictConfig) -> list[WinningWord]:
    """Let presets replace words if `presets=win` is set. The config, which Hydra saves, lists the replaced words."""
    if OmegaConf.select(config, WIN) is not True:
        return []
    require_feature(WINNING)
    replaced = put_presets_over_words(config)
    if replaced:
        config.presets.replaced = [
            {"word": each.word, "setting": each.setting, "value": content_of(each.wanted), "preset": each.preset}
            for each in replaced
        ]
    return replaced
