"""A small Qwen3 that does sums, with a bad habit; trained from scratch, the same steps on every machine, and cached."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_precision.arithmetic import task
from verl_precision.errors import EnvironmentMismatchError
from verl_precision.tiny_model import (
    IM_END,
    PAD,
    SEED,
    VOCABULARY,
    build_tokenizer,
    cached,
    host_versions,
    save,
    settings,
)

# The prompt is the sum itself, so that a response costs six tokens of context and not thirty.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LAYERS = 2
BATCH = 256
LEARNING_RATE = 3e-3
WARM_UP = 50  # steps
CHECK_EVERY = 25  # steps
KNOWN = 0.97  # training ends when this much probability is on the right answer or the slip
MAX_STEPS = 2000

Progress = Callable[[int, float], None]


def cached_arithmetic_model(on_progress: Progress = lambda step, known: None) -> Path:
    """Return the folder of the model, trained on first use.

    The cache is that of `tiny_model`; the folder's name carries a digest of everything the model depends on.

    Args:
        on_progress: called with (steps done, probability on a known answer).

    Returns:
        An absolute path.
    """
    values = [_architecture(), VOCABULARY, CHAT_TEMPLATE, SEED, BATCH, LEARNING_RATE, WARM_UP, CHECK_EVERY, KNOWN]
    source = inspect.getsource(task) + inspect.getsource(_train)
    identity = json.dumps([values, source, host_versions()])
    return cached("arithmetic", identity, lambda folder: build_arithmetic_model(folder, on_progress))


def build_arithmetic_model(folder: Path, on_progress: Progress = lambda step, known: None) -> None:
    """Train the model and write it, with tokenizer, in Hugging Face format.

    Args:
        folder: created; must not exist.
        on_progress: called with (steps done, probability on a known answer).

    Raises:
        EnvironmentMismatchError: if it does not learn, which it did with the tested versions.
        FileExistsError: if the folder exists.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    model_type, values = _architecture()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)
    _train(model, on_progress)
    save(model, build_tokenizer(CHAT_TEMPLATE), values, folder)


def _architecture() -> tuple[str, dict[str, Any]]:
    model_type, values = settings("qwen3")
    return model_type, {**values, "num_hidden_layers": LAYERS}


def _train(model, on_progress: Progress) -> None:
    """Maximise the likelihood of what the forgetful teacher writes, until the model knows what he knows."""
    import torch

    sums = task.all_sums()
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
        loss = -log_probs.sum() / (token_ids[:, task.PROMPT_LENGTH :] != VOCABULARY.index(PAD)).sum()
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
    raise EnvironmentMismatchError(
        f"the arithmetic model knows {float(known.mean()):.0%} of its answers after {MAX_STEPS} steps; {KNOWN:.0%} are "
        "wanted, and took about 350 steps with the tested versions",
        remedy="Install those: see requirements/cpu.lock.",
    )


def encode(answers: list[str]):
    """Return [810, T] int64: each sum's prompt, an answer to it and the end of the response, padded."""
    import torch

    texts = [[*(s.prompt + answer), IM_END] for s, answer in zip(task.all_sums(), answers, strict=True)]
    width = task.PROMPT_LENGTH + task.RESPONSE_LENGTH
    return torch.tensor([[VOCABULARY.index(token) for token in text + [PAD] * (width - len(text))] for text in texts])


def response_log_probs(model, token_ids_BT):
    """Return [B], the log-probability of each response, its end included, in nats."""
    import torch

    targets = token_ids_BT[:, task.PROMPT_LENGTH :]
    logits = model(input_ids=token_ids_BT[:, :-1]).logits[:, task.PROMPT_LENGTH - 1 :].float()
    log_probs_BT = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return torch.where(targets != VOCABULARY.index(PAD), log_probs_BT, 0).sum(-1)
