"""The sanity test's task for a CPU: sums, and a small Qwen3 that solves some sums sometimes.

    python recipes/sanity_arithmetic/make_task.py outputs/sanity_arithmetic/task

A sum is two digits plus one digit. A teacher trains the model from scratch (20 to 90 s on two cores, the same steps on
every machine). The teacher forgets the carry, more often for larger digits: if the last digits add up to s >= 10, the
teacher leaves out the carry with probability (s - 8)/10, from 20% at s = 10 to 100% at s = 18. So the model knows both
answers. Its accuracy is near 100% on sums without a carry, and between 80% and 0% on sums with a carry. The sanity test
needs such problems, which the model can learn and has not learned yet.
"""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from verl_precision.base.files import new_folder
from verl_precision.tools import tiny_model
from verl_precision.tools.tiny_model import IM_END, PAD, SEED, VOCABULARY, random_model, settings, write_problems

PROMPT_LENGTH = 5  # tokens, one a character: 47+8=
RESPONSE_LENGTH = 4  # tokens, at most: 108 and the end
# The prompt is the sum itself: six tokens of context, not the thirty of a chat template.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LAYERS = 2
BATCH = 256
LEARNING_RATE = 3e-3
WARM_UP = 50  # steps
CHECK_EVERY = 25  # steps
KNOWN = 0.97  # training ends when this much probability is on the right answer or the slip
MAX_STEPS = 2000

OnProgress = Callable[[int, float], None]


@dataclass(frozen=True)
class Sum:
    """A sum `first`+`second`, 10 to 99 plus 1 to 9."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        """The prompt of the model."""
        return f"{self.first}+{self.second}="

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.first + self.second)

    @property
    def slip(self) -> str | None:
        """The sum without its carry, or None if nothing is carried."""
        return str(self.first + self.second - 10) if self._digits >= 10 else None

    @property
    def slip_rate(self) -> float:
        """The share of lessons without the carry, in [0, 1]."""
        return (self._digits - 8) / 10 if self._digits >= 10 else 0.0

    @property
    def _digits(self) -> int:
        return self.first % 10 + self.second


def all_sums() -> list[Sum]:
    """Return all 810 sums, in order."""
    return [Sum(first, second) for first in range(10, 100) for second in range(1, 10)]


def build_model(folder: Path, on_progress: OnProgress = lambda step, known: None) -> None:
    """Train the model and write it, with tokenizer, in Hugging Face format.

    Args:
        folder: Folder to create.
        on_progress: Called with (steps done, probability on a known answer).

    Raises:
        SystemExit: If the model does not learn. It learned with the tested versions.
        FileExistsError: If the folder exists.
    """
    folder.mkdir(parents=True)
    model_type, values = settings("qwen3")
    values = {**values, "num_hidden_layers": LAYERS}
    model = random_model(model_type, values)
    _train(model, on_progress)
    tiny_model.save(model, tiny_model.build_tokenizer(CHAT_TEMPLATE), values, folder)


def _train(model, on_progress: OnProgress) -> None:
    """Maximise the likelihood of the teacher's answers, until the model knows them."""
    sums = all_sums()
    right, slips = encode([s.answer for s in sums]), encode([s.slip or s.answer for s in sums])
    rates = torch.tensor([s.slip_rate for s in sums])
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.99))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    for step in range(1, MAX_STEPS + 1):
        rows = torch.randint(len(sums), (BATCH,), generator=generator)
        slip = torch.rand(BATCH, generator=generator) < rates[rows]
        token_ids = torch.where(slip[:, None], slips[rows], right[rows])
        log_probs = response_log_probs(model, token_ids)
        loss = -log_probs.sum() / (token_ids[:, PROMPT_LENGTH:] != VOCABULARY.index(PAD)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if step % CHECK_EVERY == 0:
            with torch.no_grad():
                known = response_log_probs(model, right).exp()
                known = known + torch.where(rates > 0, response_log_probs(model, slips).exp(), 0)
            on_progress(step, float(known.mean()))
            if known.mean() >= KNOWN:
                return
    raise SystemExit(
        f"the model knows {float(known.mean()):.0%} of its answers after {MAX_STEPS} steps; {KNOWN:.0%} are wanted, "
        "and took about 350 steps with the tested versions. Install those: see requirements/cpu.lock."
    )


def encode(answers: list[str]) -> Tensor:
    """Return [810, T] int64: each sum's prompt, an answer to it and the end of the response, padded."""
    texts = [[*(s.prompt + answer), IM_END] for s, answer in zip(all_sums(), answers, strict=True)]
    width = PROMPT_LENGTH + RESPONSE_LENGTH
    return torch.tensor([[VOCABULARY.index(token) for token in text + [PAD] * (width - len(text))] for text in texts])


def response_log_probs(model, token_ids_BT: Tensor) -> Tensor:
    """Return [B], the log-probability of each response, its end included, in nats."""
    targets = token_ids_BT[:, PROMPT_LENGTH:]
    logits = model(input_ids=token_ids_BT[:, :-1]).logits[:, PROMPT_LENGTH - 1 :].float()
    log_probs_BT = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return torch.where(targets != VOCABULARY.index(PAD), log_probs_BT, 0).sum(-1)


def write_task(folder: Path, on_progress: OnProgress) -> None:
    """Write `problems.jsonl` and `model` into a new folder; after an interruption there is no folder."""
    with new_folder(folder) as whole:
        build_model(whole / "model", on_progress)
        write_problems(whole / "problems.jsonl", "arithmetic", ((each.prompt, each.answer) for each in all_sums()))


def main() -> None:
    """Write the task into the folder that the command line names, and print the next command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="A folder to create: FOLDER/problems.jsonl and FOLDER/model.")
    folder = parser.parse_args().folder
    if folder.exists():
        raise SystemExit(f"{folder} exists; nothing was written. Name a new folder.")
    columns = (TextColumn("training on sums"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("", total=None)
        write_task(
            folder, lambda step, known: bar.update(shown, description=f"step {step}, knows {known:.0%} of {KNOWN:.0%}")
        )
    quoted, reward = shlex.quote(str(folder)), shlex.quote(str(Path(__file__).with_name("reward.py")))
    print(f"wrote {quoted}; next:")
    print(
        f"verl-precision sanity-set {quoted}/problems.jsonl --model {quoted}/model --output {quoted}/sanity "
        f"--reward {reward} --max-prompt-tokens 8 --max-response-tokens 8"
    )


if __name__ == "__main__":
    main()
