"""The origin of each setting: verl, a recipe, a preset, or a word of the command; with `presets=win`, presets win.

A composed config does not know where its values come from. It names its sources, its choices and the command's words in
Hydra's own node, which is enough to ask Hydra for the same list of files again, in the order in which it merges them.

Hydra puts the words of a command over every file, presets too. A command that states its estimator's settings, as
public scripts do, therefore leaves little of `estimator=pg_seq_is`, and Hydra says nothing of it.
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
from verl_precision.check.keys import leaves
from verl_precision.integration.ledger import lost_symbols, require_feature
from verl_precision.presets import preset_groups

WINNING = "presets=win"  # the feature of the ledger without which nobody is known
_VERLS = re.compile(r"verl[/.](trainer|experimental)[/.]|(^|/)hydra\.conf")  # places of files that no user wrote
_OURS = ("pkg://verl_precision.presets", "structured://")  # where presets are, if one is chosen
WIN = "presets.win"  # True: presets win. False: words win on purpose. Absent: words win, and that is a finding
REPLACED = "presets.replaced"
# Parts of the weight-sync guard and of the engine: a preset means them wherever they stand.
GUARD = re.compile(r"\.worker_extension_cls$|\.send_weight_manifest$|fsdp(_config)?\._target_$")
# Of a precision, what it merely offers a value for; rules of their own judge it.
_OPTIONS = re.compile(r"\.loss_scale\.|\.attn_implementation$")
_LONGEST = 80  # characters of a word that are repeated


@dataclass(frozen=True)
class Origin:
    """Who says a setting last, before the command: a preset, or a file that is neither verl's nor a preset's."""

    who: str  # estimator=pg_seq_is, or the name of the file
    value: Any  # as it is written there: an interpolation is its own text
    group: str = ""  # of the preset, e.g. estimator; empty for a file
    offered: bool = False  # whether it stands in parts/, as an option with its default


@dataclass(frozen=True)
class Decisions:
    """What was said about a config's settings, beside what verl itself says."""

    origins: Mapping[str, Origin]  # by the setting's full name
    words: tuple[tuple[str, str], ...]  # setting and whole word of the command, in its order

    def word_about(self, setting: str) -> tuple[str, str] | None:
        """Return the last word of the command about a setting, about its block, or about something below it."""
        return next((word for word in reversed(self.words) if is_about(word[0], setting)), None)


def is_about(key: str, setting: str) -> bool:
    """Return whether a word with this key changes a setting, its block, or something below it."""
    return key == setting or setting.startswith(f"{key}.") or key.startswith(f"{setting}.")


def decisions(config: DictConfig) -> Decisions:
    """Return who says what in a composed config with Hydra's own node; nothing is known of one without."""
    name = OmegaConf.select(config, "hydra.job.config_name")
    if name is None:
        return Decisions({}, ())
    hydra = config.hydra
    sources = tuple((each.provider, f"{each.schema}://{each.path}") for each in hydra.runtime.config_sources)
    words = words_of(config)
    groups = [word for word in hydra.overrides.task if word not in {whole for _, whole in words}]
    return Decisions(_origins(sources, name, (*hydra.overrides.hydra, *groups)), words)


def words_of(config: DictConfig) -> tuple[tuple[str, str], ...]:
    """Return setting and whole word of each word of the command that chooses no group."""
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    given = OmegaConf.select(config, "hydra.overrides.task") or ()
    keys = {word: word.lstrip("+~").partition("=")[0] for word in given}
    return tuple((key, word) for word, key in keys.items() if "@" not in key and key not in choices)


@functools.lru_cache(maxsize=256)
def _origins(sources: tuple[tuple[str, str], ...], name: str, words: tuple[str, ...]) -> Mapping[str, Origin]:
    """Return who says each setting, from a search path, the primary config's name, and words that choose groups."""
    users = [place for _, place in sources if place not in _OURS and not _VERLS.search(place)]
    if not users and all(word.startswith("hydra.") for word in words):
        return {}  # nobody has chosen anything
    if lost_symbols(WINNING):
        return {}  # nor can anybody be asked
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
    """Return group and name of the preset by which a file comes in, if it comes in by one."""
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
    """Return the later of two, which Hydra takes; of two that say the same, the one that means it, not its machine."""
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
    value: Any  # that holds
    preset: str  # e.g. estimator=pg_seq_is
    wanted: Any  # the preset's value
    written: Any  # the same, unresolved
    option: bool  # the preset only offers a value for it, which is changed on purpose

    @property
    def contradicts(self) -> bool:
        """Whether the command contradicts itself.

        A scale is a place to begin: batch sizes, GPUs, paths and saving are changed on it in every recipe's run, and
        what does not fit the machine is a fault of its own. Words over a scale are in `--json` alone, and stay.
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
        value, wanted = _plain(OmegaConf.select(config, setting)), origin.value
        if "${" in str(wanted):
            trial = copy.deepcopy(config) if trial is None else trial
            _put(trial, setting, wanted)
            wanted = _plain(OmegaConf.select(trial, setting))
        if not is_same(setting, value, wanted):
            option = not GUARD.search(setting) and is_option(setting, origin)
            found.append(WinningWord(about[1], setting, value, origin.who, wanted, origin.value, option))
    return found


def is_option(setting: str, origin: Origin) -> bool:
    """Return whether a preset merely offers a value for a setting."""
    return (origin.offered and origin.group != "scale") or bool(_OPTIONS.search(setting))


def _is_moved(config: DictConfig, setting: str) -> bool:
    """Whether `fit_to_engine` has moved the setting's block to another engine's, whose rules judge it."""
    block = re.match(r"(.*(?:\.fsdp_config|critic\.fsdp))\.", setting)
    return block is not None and OmegaConf.select(config, block[1]) is None


def _put(config: DictConfig, setting: str, value: Any) -> None:
    OmegaConf.update(config, setting, copy.deepcopy(value), merge=False, force_add=True)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def is_same(setting: str, one: Any, other: Any) -> bool:
    """Return whether two values of a setting are one to verl."""
    if setting.endswith("dtype") and isinstance(one, str) and isinstance(other, str):
        return short(one) == short(other)
    off = (one is None or one is False) and (other is None or other is False)
    return off or one == other  # to verl, null means off


def put_presets_over_words(config: DictConfig) -> list[WinningWord]:
    """Put what presets say over words that contradict them; return the words that were replaced."""
    replaced = [each for each in winning_words(config) if each.contradicts]
    for each in replaced:
        _put(config, each.setting, each.written)
    return replaced


def let_presets_win(config: DictConfig) -> list[WinningWord]:
    """Do that if `presets=win` asks for it. The config, of which Hydra leaves a copy, keeps what was replaced."""
    if OmegaConf.select(config, WIN) is not True:
        return []
    require_feature(WINNING)
    replaced = put_presets_over_words(config)
    if replaced:
        config.presets.replaced = [
            {"word": each.word, "setting": each.setting, "value": _plain(each.wanted), "preset": each.preset}
            for each in replaced
        ]
    return replaced
