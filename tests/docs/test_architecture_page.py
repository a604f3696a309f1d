"""docs/architecture.md: its tree is the disk, its stations and registrations are in the code."""

import re
import subprocess
from pathlib import Path

from verl_precision.plugin import REGISTRATIONS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
TREE = re.search(r"## The tree\n```text\n(.*?)```", TEXT, re.S).group(1).splitlines()


def test_tree_is_the_disk():
    """Every top-level entry, and every entry of the package, is in the tree with a comment, and nothing else is."""
    assert all(len(line.split(None, 1)) == 2 for line in TREE)
    named = {line.split()[0].rstrip("/") for line in TREE if not line.startswith(" ")}
    inner = {line.split()[0].rstrip("/") for line in TREE if line.startswith(" ")}
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert named == {line.split("/")[0] for line in listed if not line.startswith(".")}
    package = {line.split("/")[1] for line in listed if line.startswith("verl_precision/")}
    assert inner == package - {"py.typed"}


def test_every_station_exists():
    stations = re.findall(r"`([\w/]+\.py):(\w+)`", TEXT)
    assert len(stations) > 15
    for module, name in stations:
        source = (ROOT / "verl_precision" / module).read_text()
        assert re.search(rf"^ *(?:def|class|async def) {name}\b", source, re.M), f"{module}:{name}"


def test_every_registration_has_its_row():
    rows = re.findall(r"^\| .+ \| `([\w.]+)` \| `integration/([\w/]+)\.py` \|$", TEXT, re.M)
    for _, host_module, function, _ in REGISTRATIONS:
        assert (host_module, function.partition(":")[0].replace(".", "/")) in rows
    assert len(rows) == len(REGISTRATIONS)
