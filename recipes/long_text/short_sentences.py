"""A reward for long texts: the share of sentences of at most eight words. It needs no right answer, at any length."""

import re
from typing import Any

WORDS = 8


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the share of sentences of at most `WORDS` words, from 0 to 1; 0 for a text without words."""
    sentences = [words for part in re.split(r"[.!?]+\s", solution_str) if (words := part.split())]
    return sum(len(words) <= WORDS for words in sentences) / max(1, len(sentences))
