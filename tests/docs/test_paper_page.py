"""docs/paper.md: every row has a command, and every result that it quotes stands in the page that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "paper.md"
ROWS = [
    [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| claim")
]


def test_every_equation_table_and_figure_has_a_row():
    said = " ".join(row[0] for row in ROWS)
    for kind, last in (("equation", 10), ("table", 3), ("figure", 6)):
        found = re.findall(rf"\b{kind}s? (\d+)(?: and (\d+))?", said)
        assert {int(number) for numbers in found for number in numbers if number} == {*range(1, last + 1)}
    assert all(len(row) == 3 and row[2] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_results_stand_in_the_page_they_name(row):
    assert re.fullmatch(r"-|`(?:make [\w-]+|verl-precision [^`]+|(?:pytest|python|bash) [\w.-]+/[^`]+)`", row[1])
    quoted, pages = re.findall(r'"([^"]+)"', row[2]), re.findall(r"\]\((\S+\.md)\)", row[2])
    assert bool(quoted) == bool(pages), "a result has a page, and a page a result"
    for quote in quoted:
        said = [(PAGE.parent / page).read_text().split() for page in pages]
        assert any(" ".join(quote.split()) in " ".join(words) for words in said), quote
    for path in re.findall(r"`(tests/\S+)`", row[2]):
        assert (ROOT / path).is_file(), path
