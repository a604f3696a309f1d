"""docs/real_model.md: its numbers are those of the log."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_number_is_the_logs():
    numbers = set(re.findall(r"\d+\.\d+(?:e[-+]\d+)?%?", (DOCS / "real_model.md").read_text())) - {"0.24.0", "0.24"}
    log = (DOCS / "log" / "real_model.md").read_text()
    assert len(numbers) > 50 and {number for number in numbers if number not in log} <= {"0.3", "0.1"}, "rounded here"
