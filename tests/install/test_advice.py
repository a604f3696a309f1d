"""Nothing tells a user to install what no index has: this package comes from a clone."""

import re
import subprocess

import pytest

# `pip install ... verl-precision`, with or without extras and quotes; `pip show verl-precision` is another matter.
FROM_AN_INDEX = re.compile(
    r"""\b(?:pip|uv)\b[^\n`]*\b(?:install|add|download)\b[^\n`]*?[ "'=]verl[-_]precision(?![-_/.\w])"""
)


@pytest.mark.parametrize(
    "advice", ['pip install "verl-precision[cpu]"', "pip install verl-precision", "uv pip install -U verl_precision"]
)
def test_such_advice_is_recognised(advice):
    assert FROM_AN_INDEX.search(advice)


def test_no_advice_to_install_this_package_from_an_index(root):
    listed = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines()
    texts = [root / name for name in listed if not name.startswith("tests/install/")]
    kinds = {".py", ".md", ".yaml", ".sh", ".html", ".patch", ".toml"}
    assert len(texts) > 100
    found = {
        f"{path.relative_to(root)}: {match.group(0)}"
        for path in texts
        if path.suffix in kinds and path.is_file()
        for match in FROM_AN_INDEX.finditer(path.read_text())
    }
    assert not found
