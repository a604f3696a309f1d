"""Reward = minus the number of characters: the best policy ends at once.

A sanity task (the "phantom clipping" thread used it to show that precision alone can keep RL from converging): any
correct trainer solves it in a few steps, so a run that does not is broken.
"""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return minus the response's length in characters (one token each, with the tiny tokenizer)."""
    return -float(len(solution_str))
