"""Refusals of what is not installed, or cannot be imported."""

import importlib
import os
import sys

import pytest

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.versions import require_verl


def test_a_module_that_verl_is_to_import_and_cannot_is_named(monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError("No module named 'mine'")

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    with pytest.raises(ConfigurationError, match="ModuleNotFoundError: No module named 'mine'") as refused:
        require_verl("a check of a config")
    assert (refused.value.setting, refused.value.value) == ("VERL_USE_EXTERNAL_MODULES", "mine")
    assert sys.path[-1] == os.getcwd()
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES")
    with pytest.raises(ModuleNotFoundError):  # nobody's setting is at fault
        require_verl("a check of a config")
