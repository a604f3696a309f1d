"""Recipes name their files from the repository's root."""

import pytest


@pytest.fixture(autouse=True)
def _at_root(root, monkeypatch):
    monkeypatch.chdir(root)
