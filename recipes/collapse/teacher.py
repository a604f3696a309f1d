"""The teacher of the tasks of collapse and reasoning_length, who knows the right answer half of the time."""

import torch
from torch import Tensor

QUESTIONS = [f"q{number:02d}" for number in range(16)]
ANSWERS = [f"a{number:02d}" for number in range(16)]
WORDINGS, HOW_USUAL = "abcd", (0.6, 0.25, 0.1, 0.05)  # of a step of reasoning
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} ={% endfor %}"


def teacher(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by question, the right answer, the teacher's wrong answer, and how often the teacher is right."""
    right = torch.randint(len(ANSWERS), (len(QUESTIONS),), generator=generator)
    wrong = (right + torch.randint(1, len(ANSWERS), right.shape, generator=generator)) % len(ANSWERS)
    return right, wrong, 0.3 + 0.4 * torch.rand(right.shape, generator=generator)


def right_answers(seed: int) -> list[str]:
    """Return the right answer to each question.

    Args:
        seed: Seed of the task.
    """
    return [ANSWERS[index] for index in teacher(torch.Generator().manual_seed(seed))[0]]
