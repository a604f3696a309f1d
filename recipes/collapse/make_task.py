"""The task of the collapse recipe: questions with long reasoning, and a small Qwen3 that is right half of the time.

    python recipes/collapse/make_task.py outputs/collapse/task

A response is 128 steps of reasoning, the answer and the end. A step has four equally right wordings, one of
them usual. So a response is long and random, like those of language models, and one token at its end decides.
A teacher trains the model from scratch. The teacher gives the right answer to question q with probability p(q), 0.3 to
0.7, and otherwise one fixed wrong answer. So the model can learn each question, as in the sanity test.

A small model has small logits, a language model has large ones, and 16 bits round large logits more coarsely.
Each `logits_K` is the same model with one vector added to every row of its head, so that logits are about K in size.
That adds the same number to all logits of a token and changes no probability. K is the dose: a larger K makes a
larger mismatch, in both precisions.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from teacher import ANSWERS, CHAT_TEMPLATE, HOW_USUAL, QUESTIONS, WORDINGS, right_answers, teacher
from torch import Tensor, nn

from verl_precision.base.files import new_folder
from verl_precision.tools import tiny_model
from verl_precision.tools.tiny_model import IM_END, random_model, save, settings, write_problems

END, EQUALS = IM_END, "="
REASONING = 128
STEPS = [f"s{step:03d}{wording}" for step in range(REASONING) for wording in WORDINGS]
VOCABULARY = [END, EQUALS, *QUESTIONS, *ANSWERS, *STEPS]
LOGIT_SIZES = (0, 20, 50, 70, 100, 200)
CONFIG = settings("qwen3")[1] | {
    "vocab_size": len(VOCABULARY),
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(END),
}
BATCH, UPDATES, WARM_UP, LEARNING_RATE = 64, 500, 20, 3e-3

OnProgress = Callable[[int], None]


def lessons(seed: int) -> Callable[[], Tensor]:
    """Return a function that makes a batch of lessons, [BATCH, T] token ids: question, reasoning, answer, end."""
    generator = torch.Generator().manual_seed(seed)
    right, wrong, rate = teacher(generator)
    first = {name: VOCABULARY.index(names[0]) for name, names in (("q", QUESTIONS), ("a", ANSWERS), ("s", STEPS))}

    def batch() -> Tensor:
        question = torch.randint(len(QUESTIONS), (BATCH,), generator=generator)
        answer = torch.where(torch.rand(BATCH, generator=generator) < rate[question], right[question], wrong[question])
        wording = torch.multinomial(torch.tensor(HOW_USUAL), BATCH * REASONING, replacement=True, generator=generator)
        step = torch.arange(REASONING) * len(WORDINGS) + wording.view(BATCH, REASONING)
        equals, end = (torch.full((BATCH, 1), VOCABULARY.index(token)) for token in (EQUALS, END))
        parts = (question[:, None] + first["q"], equals, step + first["s"], answer[:, None] + first["a"], end)
        return torch.cat(parts, dim=1)

    return batch


def build_model(seed: int, on_progress: OnProgress = lambda step: None) -> nn.Module:
    """Return a Qwen3 in FP32, trained by the teacher; the same number of updates on every machine.

    Args:
        seed: Seed of weights and lessons.
        on_progress: Called with the number of updates so far.
    """
    model = random_model("qwen3", CONFIG, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (1 - 0.9 * step / UPDATES)
    )
    batch = lessons(seed)
    for step in range(UPDATES):
        token_ids = batch()
        logits = model(input_ids=token_ids[:, :-1]).logits[:, 1:]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 2:].flatten(), reduction="none")
        losses = losses.view(BATCH, -1)
        optimizer.zero_grad()
        (losses.mean() + losses[:, REASONING].mean()).backward()  # the answer counts twice: it is one token of 130
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_progress(step + 1)
    return model


@torch.no_grad()
def raise_logits(model: nn.Module, size: float) -> None:
    """Add one random vector to every row of the head, so that all logits of a token move by about `size`."""
    head, norm = model.get_output_embeddings().weight, model.model.norm.weight
    direction = torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    head.add_(size * direction / (head.shape[1] ** 0.5 * norm.abs().mean()))


def build_tokenizer():
    """Return the tokenizer: one token a word."""
    positions = CONFIG["max_position_embeddings"]
    return tiny_model.build_tokenizer(CHAT_TEMPLATE, VOCABULARY, unknown=EQUALS, words=True, positions=positions)


def write_task(folder: Path, seed: int, on_progress: OnProgress = lambda step: None) -> None:
    """Write `prompts.jsonl` and the models into a new folder; after an interruption there is no folder."""
    model = build_model(seed, on_progress)
    head = model.get_output_embeddings().weight
    trained = head.detach().clone()
    with new_folder(folder) as whole:
        for size in LOGIT_SIZES:
            (whole / f"logits_{size}").mkdir(parents=True)
            with torch.no_grad():
                head.copy_(trained)
            raise_logits(model, size)
            save(model, build_tokenizer(), CONFIG, whole / f"logits_{size}")
        write_problems(whole / "prompts.jsonl", "collapse", zip(QUESTIONS, right_answers(seed), strict=True))


def main() -> None:
    """Write the task into the folder that the command line names; keep an existing one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="prompts.jsonl and logits_K are written into it, for each K.")
    parser.add_argument("--seed", type=int, default=0, help="Of the task and its model. Default: 0.")
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        columns = (*Progress.get_default_columns()[:3], TextColumn("{task.completed} updates"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("training the model", total=UPDATES)
            write_task(arguments.folder, arguments.seed, lambda step: progress.update(bar, completed=step))
    print(arguments.folder)


if __name__ == "__main__":
    main()
