"""Short answers as numbers with a unit, or as words; and the near misses, some of which the authors' rules accept."""

import pytest

from verl_precision.integration.rewards.answer_text import LONGEST, same_text

SAME = r"""
32{,}348\text{ dollars} | \$32,348 ;; 10,\!000\text{ square feet} | 10000 ;; 32\,348 | 32348
\$12.50 | \frac{25}{2} ;; $5$ | 5 ;; 1e-3 | 0.001 ;; -3\frac{1}{2} | -3.5 ;; \dfrac{3}{4}\,\text{cup} | 0.75
5\mathrm{~cm} | 5 centimeters ;; 120\text{ sq ft} | 120 feet^2 ;; 90^{\circ} | 90 degrees ;; \textbf{Friday} | friday
10\;080 | 10080 ;; 7\text{ hours}. | 7 ;; 8\!:\!34 \text{ p.m.} | 8{:}34 p.m. ;; \varnothing | \emptyset
"""
DIFFERENT = r"""
\$32,348 | 32,34 ;; 32,348 | (32,348) ;; 1,2 | 12 ;; 2 3 | 23 ;; 12.5\% | 0.125 ;; 3\frac32 | \frac92
3 1/2 | \frac32 ;; -3\frac12 | -\frac52 ;; \frac{1}{2}^2 | 1/2^2 ;; \frac123 | 1/23 ;; 1/0 | 0
1e999999999 | 1 ;; 5\text{ million} | 5 ;; 5 or more | 5 ;; 5\text{ cm} | 5\text{ m} ;; \$5 | 5\text{ cents}
5\text{ }^2 | 5 ;; 5 m | 5 ;; 12:30\text{ am} | 12:30\text{ pm} ;; \text{May 5} | 5 ;; \text{no} | \text{on}
AB | ab ;; 0.333... | \frac13 ;; 11_2 | 11 ;; [1,2] | (1,2)
"""


def pairs(table: str) -> list[list[str]]:
    return [pair.split(" | ") for row in table.strip().splitlines() for pair in row.split(" ;; ")]


@pytest.mark.parametrize("table", [SAME, DIFFERENT])
def test_the_same_and_near_misses(table):
    for one, other in pairs(table):
        assert same_text(one, other) == same_text(other, one) == (table is SAME), (one, other)
        assert same_text(one, one), "each is itself"


def test_what_is_empty_or_long_is_nothing():
    assert not same_text("\\text{}", "")
    assert same_text("1" * LONGEST, "1" * LONGEST) and not same_text("1" * (LONGEST + 1), "1" * (LONGEST + 1))
