"""Reward = 1 if all 128 steps of reasoning stand in order, in any wording, and the right answer follows; else 0."""

REASONING, WORDINGS = 128, "abcd"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return the reward of a response: `s000b s001a ... s127c a05`."""
    *steps, answer = solution_str.split() or [""]
    ordered = [step[:-1] for step in steps] == [f"s{number:03d}" for number in range(REASONING)]
    return float(ordered and all(step[-1] in WORDINGS for step in steps) and answer == ground_truth)
