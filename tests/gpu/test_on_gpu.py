"""On a GPU, what no CPU shows: long log-probs, a shadow whose actor is offloaded, the checks of the self-test."""

from functools import partial

import pytest
import torch
from rich.console import Console
from verl_engines import make_engine

from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.settings import ShadowSettings
from verl_precision.tools.engines.fsdp_scorer import engine_batch, make_group_of_one
from verl_precision.tools.selftest.session import CHECKS, run_selftest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_long_log_probs_are_exact_in_little_memory():
    """22,528 tokens and 151,936 words, as one micro-batch of the 1.5B recipes has them, beside float64."""
    tokens, words, chunk = 22528, 151936, 512
    logits = torch.empty(tokens, words, dtype=torch.float16, device="cuda").normal_(std=4).requires_grad_()
    labels, temperature = torch.randint(words, (tokens,), device="cuda"), torch.full((tokens,), 0.5, device="cuda")
    before = torch.cuda.memory_allocated()
    found = torch.stack(log_probs_and_entropy(logits, labels, temperature, chunk_tokens=chunk, with_entropy=True))
    found.sum().backward()
    # The gradient, and some FP32 copies of one chunk.
    assert torch.cuda.max_memory_allocated() - before <= logits.numel() * 2 + 6 * chunk * words * 4
    some = torch.arange(0, tokens, tokens // 16, device="cuda")
    exact = logits.detach()[some].double().requires_grad_()
    log_p = (exact / 0.5).log_softmax(-1)
    expected = torch.stack([log_p.gather(-1, labels[some, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)])
    expected.sum().backward()
    assert (found[:, some] - expected).abs().max() < 2e-5
    assert (logits.grad[some].double() - exact.grad).norm() / exact.grad.norm() < 1e-3, "rounding to FP16 makes 3e-4"


def batch():
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 90, (length,), generator=generator) for length in (12, 20, 7)]
    switches = {"use_remove_padding": True, "calculate_entropy": True, "update_lr_scheduler": True}
    return engine_batch(sequences, max_token_len_per_gpu=32, **switches)


def loss(model_output, data, dp_group):
    return -model_output["log_probs"].values().float().mean(), {}


def test_a_bf16_shadow_follows_its_offloaded_actor():
    def log_probs(engine):
        with engine.eval_mode():
            return engine.infer_batch(batch())["model_output"]["log_probs"].values().cpu()

    make_group_of_one("cuda")
    settings = ShadowSettings(dtype="bf16", ratio_source="shadow")
    build = partial(make_engine, "fp32", packed=True, rate=1e-3)
    offloaded, plain = build(shadow=settings, param_offload=True, optimizer_offload=True), build()
    for _ in range(4):
        shadows, actors = log_probs(offloaded), log_probs(plain)
        for engine in (offloaded, plain):
            with engine.train_mode():
                engine.train_batch(batch(), loss)
    gap, moved = ((found - actors).abs().mean() for found in (shadows, log_probs(plain)))
    torch.distributed.destroy_process_group()
    assert gap < 0.25 * moved


@pytest.mark.parametrize("name", [*CHECKS])
def test_check_passes(name, tmp_path):
    (outcome,) = run_selftest(tmp_path, "cuda", [name], Console())
    assert outcome.status == "passed", outcome.message
