"""The block `mismatch`: typed, bounded, every key known; switched on by every preset: test_presets.py."""

import pytest
from cases import cases
from composer import compose_verl

from verl_precision.base.errors import ConfigurationError
from verl_precision.mismatch.settings import AlarmSettings, MismatchSettings


def test_block_with_alarm():
    assert MismatchSettings.from_config({}) == MismatchSettings.from_config({"mismatch": None}) == MismatchSettings()
    block = {"keep_tokens": 2, "alarm": {"on_alarm": "stop", "baseline_steps": 9}}
    alarm = AlarmSettings(on_alarm="stop", baseline_steps=9)
    assert MismatchSettings.from_config({"mismatch": block}) == MismatchSettings(keep_tokens=2, alarm=alarm)


@pytest.mark.parametrize(("block", "message"), cases(__file__, "REFUSED"))
def test_what_cannot_be_is_refused(block, message):
    with pytest.raises(ConfigurationError, match=message):
        MismatchSettings.from_config({"mismatch": block})


@pytest.mark.parametrize(
    "url", ["", "ftp://h/secret", "http:///secret", "h/secret", "http://h/a secret", "http://h:x/secret"]
)
def test_a_url_that_cannot_be_is_refused_without_its_text(monkeypatch, url):
    monkeypatch.setenv("HOOK", url)
    for name, said in (("HOOK", "HOOK"), ("http://h/secret", r"\(hidden\)")):
        with pytest.raises(ConfigurationError, match=f"webhook_env='{said}'.*export ALARM_WEBHOOK=URL") as error:
            MismatchSettings.from_config({"mismatch": {"alarm": {"notify": {"webhook_env": name}}}})
        assert "secret" not in str(error.value)
    monkeypatch.setenv("HOOK", "https://hooks.example.com:8443/services/T/B/x?y=1")
    MismatchSettings.from_config({"mismatch": {"alarm": {"notify": {"webhook_env": "HOOK"}}}})


def test_alerts_need_a_logger_that_has_them():
    config = {"mismatch": {"alarm": {"notify": {"logger": True}}}}
    with pytest.raises(ConfigurationError, match="mismatch.alarm.notify.logger=True.*Add wandb or trackio"):
        MismatchSettings.from_config(config | {"trainer": {"logger": ["console"]}})
    assert MismatchSettings.from_config(config | {"trainer": {"logger": ["console", "wandb"]}}).alarm.notify.logger


def test_precision_presets_spell_out_the_defaults():
    assert MismatchSettings.from_config(compose_verl("+precision=fp16")) == MismatchSettings()
