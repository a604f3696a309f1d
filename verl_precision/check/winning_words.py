"""Words of the command that win over a preset that was chosen, and `presets=win`, with which they do not.

Hydra puts the words of a command over every file, presets too. A command that states its estimator's settings, as
public scripts do, therefore leaves little of `estimator=pg_seq_is`, and Hydra says nothing of it.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.check.who_decides import WINNING, Origin, decisions, words_of
from verl_precision.integration.ledger import require_feature

WIN = "presets.win"  # True: presets win. False: words win on purpose. Absent: words win, and that is a finding
REPLACED = "presets.replaced"
# Parts of the weight-sync guard and of the engine: a preset means them wherever they stand.
GUARD = re.compile(r"\.worker_extension_cls$|\.send_weight_manifest$|fsdp(_config)?\._target_$")
# Of a precision, what it merely offers a value for; rules of their own judge it.
_OPTIONS = re.compile(r"\.loss_scale\.|\.attn_implementation$")
_LONGEST = 80  # characters of a word that are repeated


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

    def __str__(self) -> str:
        """Return one line for a log."""
        return f"{self.word} is replaced by {self.wanted}, of {self.preset}"


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


def with_presets_winning(config: DictConfig) -> DictConfig:
    """Return a copy of a config in which no word contradicts a preset."""
    changed = copy.deepcopy(config)
    for each in winning_words(config):
        if each.contradicts:
            _put(changed, each.setting, each.written)
    return changed


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


def let_presets_win(config: DictConfig) -> list[WinningWord]:
    """With `presets=win`, put what presets say over the command's words; return the words that were replaced.

    The config keeps them, so that Hydra's copy of it in the run's folder has them.
    """
    if OmegaConf.select(config, WIN) is not True:
        return []
    require_feature(WINNING)
    replaced = [each for each in winning_words(config) if each.contradicts]
    for each in replaced:
        _put(config, each.setting, each.written)
    if replaced:
        config.presets.replaced = [
            {"word": each.word, "setting": each.setting, "value": _plain(each.wanted), "preset": each.preset}
            for each in replaced
        ]
    return replaced
