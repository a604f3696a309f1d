"""Reward of a sum: 1 if the response is the answer, character by character, else 0."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1.0 for an exact match and 0.0 for anything else."""
    return float(solution_str == ground_truth)
