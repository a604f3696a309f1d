"""A few sums in the columns of each data set: the same code runs on a machine without network."""

from typing import Any

from verl_precision.data.layouts import DAPO_AFTER, DAPO_BEFORE

COUNT = 64
SUMS = [(first, second) for first in range(10, 100) for second in range(1, 10)]


def stand_in_rows(layout: str) -> list[dict[str, Any]]:
    """Return rows as the data set itself would have them.

    Args:
        layout: key of `LAYOUTS`.
    """
    rows = []
    for index, (first, second) in enumerate(SUMS[:: len(SUMS) // COUNT][:COUNT]):
        rows.append(_row(layout, index, f"What is {first} + {second}?", str(first + second)))
    return rows


def _row(layout: str, index: int, question: str, answer: str) -> dict[str, Any]:
    if layout == "math":
        solution = f"Adding gives $\\boxed{{{answer}}}$."
        return {"problem": question, "level": "Level 1", "type": "Prealgebra", "solution": solution}
    if layout == "problem_answer":
        return {"problem": question, "answer": answer}
    if layout == "aime":
        return {"ID": f"stand-in-{index}", "Problem": question, "Solution": "", "Answer": int(answer)}
    return {
        "data_source": "stand_in",
        "prompt": [{"role": "user", "content": DAPO_BEFORE + question + DAPO_AFTER}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": str(index)},
    }
