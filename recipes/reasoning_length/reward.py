"""Reward = 1 if all chapters and their steps stand in order, in any wording, and the right answer follows; else 0."""

STEPS, CHAPTER, WORDINGS = 62, 64, "abcd"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return the reward of a response: `q05 c001 s00a ... s61b q05 c000 s00a ... s61d a05`.

    The length is the one that the question asks for: a data source ends with its number of tokens.
    """
    *text, answer = solution_str.split() or [""]
    tokens = int(data_source.rpartition("_")[2])
    expected = [f"s{step:02d}" for step in range(STEPS)]
    chapters = [text[start : start + CHAPTER] for start in range(0, len(text), CHAPTER)]
    ordered = len(text) == tokens and all(
        number == f"c{left:03d}" and question == text[0] and [step[:-1] for step in steps] == expected
        for left, (question, number, *steps) in zip(reversed(range(len(chapters))), chapters, strict=True)
    )
    return float(ordered and all(word[-1] in WORDINGS for word in text if word[0] == "s") and answer == ground_truth)
