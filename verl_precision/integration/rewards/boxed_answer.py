r"""Reward for answers in \boxed{}, as the paper's authors give it: the last box, in any form that is equal.

In a recipe, with 0 for a wrong answer or with DAPO's -1:

    reward:
      custom_reward_function:
        path: pkg://verl_precision.integration.rewards.boxed_answer
        reward_kwargs: {wrong: -1.0}
"""

from verl_precision.integration.rewards.math_answers import braced_box, same_answer


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    wrong: float = 0.0,
) -> dict[str, float]:
    r"""Return `score`, 1.0 or `wrong`, and `acc`, 1.0 or 0.0. Words after the box do not matter.

    Args:
        data_source: Where the problem comes from; every source is judged alike.
        solution_str: The response.
        ground_truth: The right answer, without a box.
        extra_info: verl's; not used.
        wrong: Score of a wrong answer, and of a response whose last box is missing or was cut off.
    """
    box = braced_box(solution_str)
    right = box is not None and same_answer(box, str(ground_truth))
    return {"score": 1.0 if right else wrong, "acc": float(right)}
