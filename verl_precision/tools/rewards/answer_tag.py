"""Reward for answers in <answer> tags: what the template `octothinker` asks for, and verl's own rules do not read.

In a recipe: `reward.custom_reward_function.path: pkg://verl_precision.tools.rewards.answer_tag`.
"""

from verl_precision.tools.rewards.math_answers import braced_box, same_answer

OPEN, CLOSE, FORMAT = "<answer>", "</answer>", "</think> <answer>"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, as_published: bool = False
) -> float:
    r"""Return 1.0 if the response ends its thought and gives the right answer, in any form that is equal, else 0.0.

    What the model goes on to write after its answer is not read: generation stops there (`agent_loop`), and
    the authors' rule never sees more. As there, `</think> <answer>` must close the thought before the answer, and an
    answer within \boxed{} counts by its content.
    """
    answered, closed, _ = solution_str.partition(CLOSE)
    if not closed or FORMAT not in answered:
        return 0.0
    answer = answered.rpartition(OPEN)[2]
    if "\\boxed" in answer:
        answer = braced_box(answer) or ""
    return float(same_answer(answer, str(ground_truth), as_published))
