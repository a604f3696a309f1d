"""verl is imported with the modules that the user has it import, wherever the command starts."""

import importlib
import os
import sys
from unittest.mock import Mock

from verl_precision.base.versions import require_verl


def test_a_module_that_verl_is_to_import_is_found_in_the_working_directory(monkeypatch):
    monkeypatch.setattr("verl_precision.base.versions.require_packages", Mock())
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(importlib, "import_module", Mock())
    require_verl("a check")
    assert sys.path == []
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    require_verl("a check")
    assert sys.path == [os.getcwd()]
