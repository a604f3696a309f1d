"""Optional features of a run. They are installed beside the plugin, and a process loads those that its settings enable.

A feature is an entry point (setup.py). Its group is the place where the feature enters a run. Its name is the setting
that enables the feature: `mismatch.keep_tokens` with any value except null, False, 0, none and an empty text, or
`mismatch.alarm.on_alarm:rescue` with this value alone.

verl_precision.trainer  classes of trainer callbacks, by the run's config       integration/trainer
verl_precision.driver   functions that may replace the driver, by the config    check/preflight.py
verl_precision.engine   steps of an engine's build, by the engine's settings    integration/engine/build.py
verl_precision.rollout  functions that a vLLM process calls as it starts        integration/cpu/vllm_on_cpu.py
verl_precision.rules    modules of rules, by the run's config                   check/rules
verl_precision.resolve  functions behind `${verl_precision.<name>:...}`         integration/resolvers.py
"""

import functools
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from verl_precision.base.errors import ConfigurationError

PREFIX = "verl_precision."
_OFF = (None, False, 0, "", "none")
_all_installed = functools.cache(metadata.entry_points)  # reads every installed distribution, so only once


def installed(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of a group of this package, by name."""
    return sorted(_all_installed().select(group=PREFIX + group), key=lambda point: point.name)


def _asks(name: str, value_of: Callable[[str], object]) -> bool:
    setting, _, wanted = name.partition(":")
    value = value_of(setting)
    return str(value) == wanted if wanted else value not in _OFF


def features_asked_for(group: str, value_of: Callable[[str], object], promised: Iterable[str] = ()) -> list[Any]:
    """Return the objects of a group whose settings are switched on, each once, sorted by name.

    `value_of` returns the value of a setting, or None. If a `promised` feature is enabled but not installed,
    ConfigurationError is raised; otherwise the run would leave out the feature in silence.
    """
    points = installed(group)
    asked = {point.value: point for point in points if _asks(point.name, value_of)}
    for name in promised:
        if _asks(name, value_of) and name not in {point.name for point in points}:
            setting = name.partition(":")[0]
            raise ConfigurationError(
                "the feature that this setting enables is not installed", setting=setting, value=value_of(setting),
                allowed="an installed feature",
                remedy="Install verl-precision again: its list of features belongs to another version.",
            )  # fmt: skip
    return [point.load() for point in asked.values()]
