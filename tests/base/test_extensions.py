"""Features are loaded where a setting asks for them, and a promised one is never left out in silence."""

from importlib import metadata

import pytest

from verl_precision.base import extensions
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.extensions import features_asked_for


@pytest.fixture
def installed(monkeypatch):
    """Install entry points: (name, value) each."""

    def install(*rows):
        points = [metadata.EntryPoint(name, value, "verl_precision.trainer") for name, value in rows]
        monkeypatch.setattr(extensions, "installed", lambda group: points if group == "trainer" else [])

    return install


def test_a_feature_is_loaded_by_its_setting_once(installed):
    installed(("a.kept", "json:loads"), ("b.act:mask", "json:dumps"), ("b.act:rescue", "json:dumps"), ("c", "absent:x"))
    on = {"a.kept": 4, "b.act": "rescue", "c": 0}
    assert [each.__name__ for each in features_asked_for("trainer", on.get)] == ["loads", "dumps"]
    off = {"a.kept": 0, "b.act": "log", "c": None}
    assert features_asked_for("trainer", off.get) == []
    assert features_asked_for("engine", on.get) == []


def test_a_promised_feature_that_is_not_installed_is_refused(installed):
    installed(("a.kept", "json:loads"))
    assert features_asked_for("trainer", {"b.act": "log"}.get, promised=["b.act:rescue"]) == []
    with pytest.raises(ConfigurationError) as error:
        features_asked_for("trainer", {"b.act": "rescue"}.get, promised=["a.kept", "b.act:rescue"])
    assert error.value.setting == "b.act"
