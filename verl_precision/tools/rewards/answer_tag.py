"""Reward for answers in <answer> tags, which the template `octothinker` requests and verl's own rules do not read.

In a recipe: `reward.custom_reward_function.path: pkg://verl_precision.tools.rewards.answer_tag`.
"""

from verl_precision.tools.rewards.math_answers import braced_box, same_answer

OPEN, CLOSE, FORMAT = "<answer>", "</answer>", "</think> <answer>"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, as_published: bool = False
) -> float:
    r"""Return 1.0 if the response closes its thought and gives the right answer in any equal form, otherwise 0.0.

    Text after the answer is not read: generation stops at the answer (`agent_loop`), so the authors' rule never gets
    such text. As in the authors' rule, `</think> <answer>` must close the thought before the answer, and only the
    content of an answer in \boxed{} counts.
    """
    answered, closed, _ = solution_str.partition(CLOSE)
    if not closed or FORMAT not in answered:
        return 0.0
    answer = answered.rpartition(OPEN)[2]
    if "\\boxed" in answer:
        answer = braced_box(answer) or ""
    return float(same_answer(answer, str(ground_truth), as_published))
