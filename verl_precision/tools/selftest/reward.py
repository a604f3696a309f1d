"""The reward of the self-test's runs: shorter is better, which any policy can learn."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return minus the response's length in characters."""
    return -float(len(solution_str))
