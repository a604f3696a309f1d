"""The block `mismatch`: typed, bounded, every key known, and switched on by every preset."""

import pytest
from hydra import compose, initialize_config_module

from verl_precision.base.errors import ConfigurationError
from verl_precision.mismatch.settings import AlarmSettings, MismatchSettings
from verl_precision.presets import preset_names


def test_block_with_alarm():
    assert MismatchSettings.from_config({}) == MismatchSettings.from_config({"mismatch": None}) == MismatchSettings()
    block = {"keep_tokens": 2, "alarm": {"on_alarm": "stop", "baseline_steps": 9}}
    alarm = AlarmSettings(on_alarm="stop", baseline_steps=9)
    assert MismatchSettings.from_config({"mismatch": block}) == MismatchSettings(keep_tokens=2, alarm=alarm)


@pytest.mark.parametrize(("block", "message"), [
    ({"enable": False}, "mismatch.enable=False: there is no such setting. Allowed: mismatch.enabled, "),
    ({"enabled": "yes"}, "mismatch.enabled='yes'.*Allowed: a valid boolean"),
    ({"enabled": False, "keep_tokens": 2}, "mismatch.keep_tokens=2.*keeps no tokens"),
    ({"self_gap_every_n_steps": -1}, "mismatch.self_gap_every_n_steps=-1"),
    ({"alarm": {"on_alarms": "stop"}}, "mismatch.alarm.on_alarms='stop': there is no such setting"),
    ({"alarm": {"on_alarm": "shout"}}, "alarm.on_alarm='shout': this cannot work. Allowed: 'log', 'stop' or 'rescue'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(block, message):
    with pytest.raises(ConfigurationError, match=message):
        MismatchSettings.from_config({"mismatch": block})


@pytest.mark.parametrize("group", ["precision", "estimator", "scale"])
def test_every_preset_alone_switches_it_on(group):
    with initialize_config_module("verl_precision.presets", version_base=None):
        for name in preset_names(group):
            assert compose(f"{group}/{name}").mismatch.enabled is True, name


def test_precision_presets_spell_out_the_defaults(compose_verl):
    assert MismatchSettings.from_config(compose_verl("+precision=fp16")) == MismatchSettings()
