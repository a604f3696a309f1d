"""docs/selftest.md has every check of the self-test, what it shows, and why a CPU does not run it."""

import re
from pathlib import Path

from verl_precision.tools.selftest.checks import CHECKS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "selftest.md").read_text()


def test_table_is_the_checks():
    rows = re.findall(r"^\| ([AB]) \| `(\w+)` \| (.+) \| (.+) \|$", TEXT, re.M)
    on_a_cpu = [f"not run: {check.needs_gpu}" if check.needs_gpu else "yes" for check in CHECKS]
    assert rows == [(check.part, check.name, check.shows, cpu) for check, cpu in zip(CHECKS, on_a_cpu, strict=True)]


def test_time_limits_are_the_checks():
    assert {check.seconds for check in CHECKS} == {300, 600}
    longer = [check.name for check in CHECKS if check.seconds == 600]
    named = re.search(r"after 5 minutes \(10 for ([^)]+)\)", TEXT)
    assert named and re.findall(r"`(\w+)`", named.group(1)) == longer


def test_every_name_in_the_table_of_times_is_a_check():
    named = re.findall(r"^\| `(\w+)` \| \d+ \|$", TEXT, re.M)
    assert named and set(named) <= {check.name for check in CHECKS}
