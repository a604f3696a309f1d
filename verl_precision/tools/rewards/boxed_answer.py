r"""Reward for answers in \boxed{}: the last box, in any form that is equal by mathematics.

In a recipe, with 0 for a wrong answer or with DAPO's -1:

    reward:
      custom_reward_function:
        path: pkg://verl_precision.tools.rewards.boxed_answer
        reward_kwargs: {wrong: -1.0}

The authors' whole rule is `{as_published: True, require_closed_thinking: True, require_finished: True}` (docs/data.md).
"""

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.rewards.math_answers import braced_box, same_answer

CLOSE, TRUNCATED = "</think>", "truncated"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    wrong: float = 0.0,
    require_closed_thinking: bool = False,
    require_finished: bool = False,
    as_published: bool = False,
) -> dict[str, float]:
    r"""Return `score`, 1.0 or `wrong`, and `acc`, 1.0 or 0.0. Words after the box do not matter.

    Args:
        data_source: Not read: every source is judged alike.
        solution_str: The response.
        ground_truth: The right answer, without a box.
        extra_info: verl's, with the agent loop's additions; `truncated` is read if a response must be finished.
        wrong: Score of a wrong answer, and of a response whose last box is missing or was cut off.
        require_closed_thinking: Whether a response counts only with exactly one `</think>`, and a box only after it.
        require_finished: Whether a response that ended at the length limit is always wrong.
        as_published: Whether the authors' rules decide, which accept some wrong answers and refuse some right ones.
    """
    if require_closed_thinking:
        solution_str = solution_str.partition(CLOSE)[2] if solution_str.count(CLOSE) == 1 else ""
    if require_finished:
        if extra_info is None or TRUNCATED not in extra_info:
            raise ConfigurationError(
                "this reward does not know which responses were cut off at the length limit",
                setting="reward.custom_reward_function.reward_kwargs.require_finished",
                value=True,
                allowed="True with the agent loop vp_single_turn and the reward manager naive, rate_limited or remote",
                remedy="Set actor_rollout_ref.rollout.agent.default_agent_loop=vp_single_turn and "
                "+actor_rollout_ref.rollout.custom.mark_truncated=True.",
            )
        solution_str = "" if extra_info[TRUNCATED] else solution_str
    box = braced_box(solution_str)
    right = box is not None and same_answer(box, str(ground_truth), as_published)
    return {"score": 1.0 if right else wrong, "acc": float(right)}
