"""The cases of a test that are data: a YAML file of the test's name, beside it, has a table of each kind."""

from pathlib import Path

import yaml


def cases(test: str, table: str) -> list:
    """Return a table of a test, which gives its `__file__`."""
    return yaml.safe_load(Path(test).with_suffix(".yaml").read_text())[table]
