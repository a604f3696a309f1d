"""Reward of the stand-in sums: 1 if the answer, one digit, is somewhere in the response, else 0.

A random tiny model is right now and then, so a group of responses has right and wrong ones and every estimator has a
gradient. It measures nothing else. Returns `acc`, which dynamic sampling (estimator=dapo) looks at.
"""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> dict[str, float]:
    """Return score and acc, 1.0 or 0.0."""
    found = float(ground_truth in solution_str)
    return {"score": found, "acc": found}
