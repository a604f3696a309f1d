"""docs/public_commands.md: each row's overrides give its finding, and each line of verl is about what the row says."""

import importlib.util
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "public_commands.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if "verl-precision check " in line and line.startswith("| ")
]
# What stands on a line of the installed verl that proves a row.
PROOFS = dict(line.split(" ", 1) for line in Path(__file__).with_name("proofs.txt").read_text().splitlines())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[4].split()[-1].strip("`"))
def test_the_overrides_give_the_finding(row, findings):
    command, finding = row[4].strip("`"), row[5].strip("`")
    _, found = findings(*shlex.split(command)[2:], "actor_rollout_ref.rollout.name=vllm")
    assert finding in {each["name"] for each in found}


def test_each_line_is_where_the_page_says():
    assert len(ROWS) >= 17 and {row[3].strip("`") for row in ROWS} == set(PROOFS)
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    for place, words in PROOFS.items():
        name, _, number = place.partition(":")
        assert words in (verl / name).read_text().splitlines()[int(number) - 1], place
