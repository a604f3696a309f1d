"""Reward for answers in <answer> tags: what the template `octothinker` asks for, and verl's own rules do not read.

In a recipe: `reward.custom_reward_function.path: pkg://verl_precision.integration.answer_tag`.
"""

OPEN, CLOSE = "<answer>", "</answer>"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    r"""Return 1.0 if the last <answer> is the ground truth, else 0.0; equality is that of verl's MATH rule.

    An answer within \boxed{} counts by its content. Without a closed <answer>, the response is wrong.
    """
    from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, remove_boxed

    before, found, _ = solution_str.rpartition(CLOSE)
    _, opened, answer = before.rpartition(OPEN)
    if not found or not opened:
        return 0.0
    boxed = last_boxed_only_string(answer)
    if boxed is not None and boxed.startswith("\\boxed"):
        answer = remove_boxed(boxed)
    return float(is_equiv(answer.strip(), ground_truth))
