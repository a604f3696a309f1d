"""Recipes name their files from the repository's root."""

import sys

import pytest
from discovered import ROOT

sys.path.insert(0, str(ROOT / "recipes/sanity_arithmetic"))  # make_task is a script, not a module of the package


@pytest.fixture(autouse=True)
def _at_root(root, monkeypatch):
    monkeypatch.chdir(root)
