"""The task of this recipe: questions with reasoning of any length, and one small Qwen3 that is right half of the time.

    python recipes/reasoning_length/make_task.py outputs/reasoning_length/task

A response has N chapters of 64 tokens, the answer and the end. A chapter repeats the question, says how many chapters
follow, and has 62 steps, each with four right wordings. So the text is as random in each chapter as in any other, and
one token at the end decides. The prompt names N; 2 chapters are 128 tokens, 128 chapters 8,192.

Each layer sees the last WINDOW tokens alone, so the model cannot tell a long response from a short one but by its
count. It is trained from scratch on lessons of LESSON chapters, and used at every length. Nothing is added to its
weights. The teacher gives the right answer to question q with probability p(q), 0.3 to 0.7, and otherwise one
fixed wrong answer.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from banded_attention import WINDOW
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from verl_precision.base.files import new_folder
from verl_precision.tools import tiny_model
from verl_precision.tools.tiny_model import IM_END, random_model, save, settings, write_problems

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "collapse"))
from teacher import ANSWERS, CHAT_TEMPLATE, HOW_USUAL, QUESTIONS, WORDINGS, right_answers, teacher

END, EQUALS = IM_END, "="
CHAPTER, STEPS = 64, 62
LENGTHS = (128, 512, 2048, 8192)  # tokens of reasoning
MOST = LENGTHS[-1] // CHAPTER
CHAPTERS = [f"c{number:03d}" for number in range(MOST + 1)]
REASONING = [f"s{step:02d}{wording}" for step in range(STEPS) for wording in WORDINGS]
VOCABULARY = [END, EQUALS, *QUESTIONS, *ANSWERS, *CHAPTERS, *REASONING]
LAYERS = 1
CONFIG = settings("qwen3")[1] | {
    "vocab_size": len(VOCABULARY),
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LENGTHS[-1] + CHAPTER,
    "initializer_range": 0.1,
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(END),
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * LAYERS,
    "max_window_layers": LAYERS,  # vLLM refuses another value; transformers reads layer_types
}
PROMPT = 3  # tokens
LEAST_WRONG = -18.0  # log-probability of all words together that the teacher would not say
BATCH, LESSON, UPDATES, WARM_UP, LEARNING_RATE = 16, 4, 1500, 20, 5e-3

OnProgress = Callable[[int], None]


def lessons(seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that makes a batch of lessons: a prompt and LESSON chapters.

    Every second lesson has no more chapters, and goes on with the answer and the end. Returned are token ids,
    [BATCH, T], and the teacher's probabilities of the next token, [BATCH, T - 1, vocabulary].
    """
    generator = torch.Generator().manual_seed(seed)
    right, wrong, rate = teacher(generator)
    first = {name[0]: VOCABULARY.index(name) for name in ("q00", "a00", "c000", "s00a")}
    usual = torch.tensor(HOW_USUAL)

    def batch() -> tuple[Tensor, Tensor]:
        question = torch.randint(len(QUESTIONS), (BATCH, 1), generator=generator)
        chapters = torch.randint(LESSON, MOST + 1, (BATCH, 1), generator=generator)
        chapters[::2] = LESSON
        is_right = torch.rand(question.shape, generator=generator) < rate[question]
        answer = torch.where(is_right, right[question], wrong[question]) + first["a"]
        wording = torch.multinomial(usual, BATCH * LESSON * STEPS, replacement=True, generator=generator)
        steps = first["s"] + torch.arange(STEPS) * len(WORDINGS) + wording.view(BATCH, LESSON, STEPS)
        left = chapters - torch.arange(1, LESSON + 1) + first["c"]
        heads = torch.stack([(question + first["q"]).expand_as(left), left], dim=-1)
        text = torch.cat([heads, steps], dim=-1).flatten(1)
        end = torch.cat([answer, torch.full_like(answer, VOCABULARY.index(END))], dim=1)
        more = torch.cat([question + first["q"], chapters - LESSON - 1 + first["c"]], dim=1)
        equals = torch.full_like(question, VOCABULARY.index(EQUALS))
        prompt = torch.cat([question + first["q"], chapters + first["c"], equals], dim=1)
        token_ids = torch.cat([prompt, text, torch.where(chapters == LESSON, end, more)], dim=1)

        following = token_ids[:, 1:]
        probabilities = nn.functional.one_hot(following, len(VOCABULARY)).float()
        is_step = following >= first["s"]
        step = (following[is_step] - first["s"]) // len(WORDINGS)
        of_steps = torch.zeros(STEPS, len(VOCABULARY))
        of_steps[:, first["s"] :] = torch.block_diag(*[usual[None]] * STEPS)
        probabilities[is_step] = of_steps[step]
        lesson = torch.arange(0, BATCH, 2)
        for answers, share in ((right, rate), (wrong, 1 - rate)):
            probabilities[lesson, -2, answers[question[::2, 0]] + first["a"]] = share[question[::2, 0]]
        return token_ids, probabilities

    return batch


def build_model(seed: int, on_progress: OnProgress = lambda step: None, least_wrong: float = LEAST_WRONG) -> nn.Module:
    """Return a Qwen3 in FP32, trained to the teacher's probabilities; the same number of updates on every machine.

    Args:
        seed: Seed of weights and lessons.
        on_progress: Called with the number of updates so far.
        least_wrong: Log-probability of all wrong words together above which training lowers it; 0: never.
    """
    model = random_model("qwen3", CONFIG, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (1 - 0.95 * step / UPDATES)
    )
    batch = lessons(seed)
    for step in range(UPDATES):
        token_ids, probabilities = batch()
        logits = model(input_ids=token_ids[:, :-1]).logits[:, PROMPT - 1 :]
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), probabilities[:, PROMPT - 1 :].transpose(1, 2), reduction="none"
        )
        heads = losses[:, :-2].unflatten(1, (LESSON, CHAPTER))[:, :, :2]
        not_taught = logits.masked_fill(probabilities[:, PROMPT - 1 :] > 0, float("-inf"))
        surplus = nn.functional.relu(not_taught.logsumexp(-1) - logits.logsumexp(-1) - least_wrong)
        optimizer.zero_grad()
        # Few tokens are no step. And a response of 8,192 tokens must stay right while its weights move.
        (losses.mean() + heads.mean() + losses[:, -2:].mean() + 0.1 * surplus.mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_progress(step + 1)
    return model


def build_tokenizer():
    """Return the tokenizer: one token a word."""
    positions = CONFIG["max_position_embeddings"]
    return tiny_model.build_tokenizer(CHAT_TEMPLATE, VOCABULARY, unknown=EQUALS, words=True, positions=positions)


def write_task(folder: Path, seed: int, on_progress: OnProgress, least_wrong: float) -> None:
    """Write the model and the questions of each length into a new folder; after an interruption there is no folder."""
    model = build_model(seed, on_progress, least_wrong)
    answers = right_answers(seed)
    with new_folder(folder) as whole:
        (whole / "model").mkdir(parents=True)
        save(model, build_tokenizer(), CONFIG, whole / "model")
        for tokens in LENGTHS:
            prompts = [f"{question} {CHAPTERS[tokens // CHAPTER]}" for question in QUESTIONS]
            write_problems(whole / f"prompts_{tokens}.jsonl", f"reasoning_{tokens}", zip(prompts, answers, strict=True))


def main() -> None:
    """Write the task into the folder that the command line names; keep an existing one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="model and prompts_TOKENS.jsonl are written into it.")
    parser.add_argument("--seed", type=int, default=0, help="Of the task and its model. Default: 0.")
    less = f"Log-probability that wrong words may have; 0: whatever they have. Default: {LEAST_WRONG:g}."
    parser.add_argument("--least-wrong", type=float, default=LEAST_WRONG, help=less)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        columns = (*Progress.get_default_columns()[:3], TextColumn("{task.completed} updates"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("training the model", total=UPDATES)
            report = lambda step: progress.update(bar, completed=step)  # noqa: E731
            write_task(arguments.folder, arguments.seed, report, arguments.least_wrong)
    print(arguments.folder)


if __name__ == "__main__":
    main()
