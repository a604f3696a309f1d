"""From a question to chat messages: the model's own chat template goes around them.

The wording is the one published with each model or data set, and used by the paper's authors
(https://github.com/sail-sg/Precision-RL, oat/main.py): results depend on it.
"""

from collections.abc import Callable

from verl_precision.data.layouts import DAPO_AFTER, DAPO_BEFORE

Messages = list[dict[str, str]]
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
# DeepSeek-R1 (arXiv:2501.12948), table 1, the form for base models.
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>."
    "\nUser: {question}\nAssistant: <think>"
)


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


TEMPLATES: dict[str, Callable[[str], Messages]] = {
    # DeepSeek-R1-Distill: no system prompt; its chat template opens <think>.
    "r1_distill": lambda question: _user(f"{question} {STEP_BY_STEP}\n"),
    # Qwen2.5-Math.
    "qwen_math": lambda question: [{"role": "system", "content": STEP_BY_STEP}, *_user(question)],
    # Qwen3 base models.
    "qwen3_base": lambda question: _user(f"Question: {question}\n{STEP_BY_STEP}"),
    # OctoThinker: plain text, no chat. Needs a chat template that passes it through, and the reward data.answer_tag.
    "octothinker": lambda question: _user(R1_ZERO.replace("{question}", question)),
    # DAPO's own data.
    "dapo": lambda question: _user(DAPO_BEFORE + question + DAPO_AFTER),
}
