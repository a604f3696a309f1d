"""docs/real_model.md: the log has each of its table rows and numbers, and its figures are there."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, LOG = ((DOCS / name).read_text() for name in ("real_model.md", "log/real_model.md"))
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?%?")


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of a text's tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_rows_stand_in_the_log():
    assert len(rows(PAGE)) >= 9 + 6 + 5 + 2, "pairs, lengths, probabilities, both runs"
    recorded = rows(LOG)
    assert [row for row in rows(PAGE) if row not in recorded] == []


def test_numbers_stand_in_the_log():
    said = re.sub(r"\]\([^)]*\)", "]", PAGE)  # without the targets of links
    numbers, recorded = set(NUMBER.findall(said)), set(NUMBER.findall(LOG))
    assert len(numbers) > 50
    assert sorted(numbers - recorded) == []


def test_four_figures():
    figures = re.findall(r"!\[[^]]+\]\((\w+\.png)\)", PAGE)
    assert len(figures) == 4 and all((DOCS / name).is_file() for name in figures)
