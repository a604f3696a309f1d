"""Part A, as far as torch alone shows it: overflows under offloading, log-probs, digest, experts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.check.installation import findings
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.loss_scaling import LossScaler
from verl_precision.engine.process_group import one_rank
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.selftest.checks import Figures, require
from verl_precision.weight_sync.manifest import StreamDigest, bit_view, digest

GIB = 2**30


def installation(device: str, folder: Path) -> Figures:
    """Ask what `verl-precision check` asks of an installation."""
    found = list(findings())
    wrong = [f"{finding.what}: {finding.detail}" for finding in found if not finding.ok]
    require(not wrong, "; ".join(wrong), "Run `verl-precision check`.")
    return {"findings": len(found)}


def log_probs(device: str, folder: Path) -> Figures:
    """Take log-probs of 22,528 tokens and 151,936 words, as one micro-batch of the 1.5B recipes has them.

    On a CPU fewer of both. Values and gradients of some rows are compared with float64.
    """
    tokens, words, chunk = (22528, 151936, 512) if device == "cuda" else (1024, 20000, 256)
    logits = torch.empty(tokens, words, dtype=torch.float16, device=device)
    for rows in logits.split(2048):
        rows.copy_(torch.randn(rows.shape, device=device) * 4)
    logits.requires_grad_(True)
    labels = torch.randint(words, (tokens,), device=device)
    temperature = torch.full((tokens,), 0.8, device=device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def forward_and_backward() -> tuple[Tensor, Tensor]:
        logits.grad = None
        found, entropy = log_probs_and_entropy(logits, labels, temperature, chunk_tokens=chunk, with_entropy=True)
        assert entropy is not None
        (found.sum() + entropy.sum()).backward()
        return found.detach(), entropy.detach()

    seconds = timed(forward_and_backward, device)
    extra = (torch.cuda.max_memory_allocated() - before) / GIB if device == "cuda" else 0.0
    found, entropy = forward_and_backward()
    some = torch.arange(0, tokens, tokens // 16, device=device)
    exact = logits.detach()[some].double().requires_grad_(True)
    log_p = (exact / temperature[some, None].double()).log_softmax(-1)
    expected = log_p.gather(-1, labels[some, None]).squeeze(-1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    (expected.sum() + expected_entropy.sum()).backward()
    error = max(float((found[some] - expected).abs().max()), float((entropy[some] - expected_entropy).abs().max()))
    require(error < 2e-5, f"log-probs or entropy are off by {error:.1e} nats; float32 arithmetic is off by 1e-6")
    assert logits.grad is not None and exact.grad is not None
    off = float((logits.grad[some].double() - exact.grad).norm() / exact.grad.norm())
    require(off < 1e-3, f"the gradient of the logits is off by {off:.1e}; rounding to FP16 makes 3e-4")
    size = logits.numel() * 2 / GIB
    if device == "cuda":  # the gradient, and a few FP32 copies of one chunk
        bound = size + 6 * chunk * words * 4 / GIB
        require(extra <= bound, f"the peak is {extra:.1f} GiB above the logits; at most {bound:.1f} were expected")
    return {"tokens": tokens, "logits_gib": size, "extra_gib": extra, "ms": seconds * 1e3, "error_nats": error}


def digests(device: str, folder: Path) -> Figures:
    """Flip one bit of a large tensor and compare digests; time the digest beside a copy of the same bytes."""
    elements, small_tensors = (2**31, 19000) if device == "cuda" else (2**27, 2000)
    large = torch.empty(elements, dtype=torch.bfloat16, device=device)
    for part in large.split(2**26):
        part.copy_(torch.randn(part.shape, device=device))
    first = digest(large)
    bits = bit_view(large)
    bits[elements // 3] ^= 1
    require(digest(large) != first, "a flipped bit of a large tensor was not seen")
    bits[elements // 3] ^= 1
    require(digest(large) == first, "the same tensor has two digests")
    copied = torch.empty_like(large)
    seconds, copy_seconds = timed(lambda: digest(large), device), timed(lambda: copied.copy_(large), device)
    small = list(large[: small_tensors * 4096].view(small_tensors, 64, 64))

    def stream() -> None:
        digests = StreamDigest()
        for number, tensor in enumerate(small):
            digests.add(str(number), tensor)
        digests.fetch()

    each = timed(stream, device, repeats=1) / small_tensors
    gigabytes = large.numel() * 2 / 1e9
    return {
        "gigabytes": gigabytes,
        "digest_gb_per_s": gigabytes / seconds,
        "copy_gb_per_s": gigabytes / copy_seconds,
        "times_a_copy": seconds / copy_seconds,
        "small_tensor_us": each * 1e6,
    }


def offload_overflow(device: str, folder: Path) -> Figures:
    """Plant 500 overflows under `offload_policy`, behind a busy stream; count those that each scaler misses.

    Gradients are on the host then, and torch's scaler reads there what the GPU has not finished to copy. Its figures
    are reported, ours must be zero.
    """
    figures: Figures = {}
    with one_rank("cuda"):
        for name, overflows in (("ours", 500), ("torch", 100)):
            missed, false = _planted(name, overflows)
            figures |= {f"{name}_planted": overflows, f"{name}_missed": missed, f"{name}_false": false}
            if name == "ours":
                problem = f"{missed} of {overflows} overflows were missed, {false} reported where there was none"
                require(missed == false == 0, problem, "Do not train in FP16 with offload_policy=True here.")
    return figures


def _planted(name: str, overflows: int) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    sharding: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for module in [*model, model]:
        fully_shard(module, **sharding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ours = LossScaler(LossScaleSettings(initial=1024.0, growth_interval=10**9), "cuda")
    scaler = ours if name == "ours" else ShardedGradScaler(device="cuda", init_scale=1024.0, growth_interval=10**9)
    inputs, square = torch.randn(16, 512, device="cuda"), torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
    missed = false = 0
    for step in range(2 * overflows):
        planted = step % 2 == 0
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean() * (float("inf") if planted else 1.0)
        scaler.scale(loss).backward()
        for _ in range(3):  # keeps the stream busy while the host looks at the gradients
            torch.mm(square, square)
        scaler.unscale_(optimizer)
        found = sum(float(flag) for flag in scaler._found_inf_per_device(optimizer).values()) > 0
        missed, false = missed + (planted and not found), false + (found and not planted)
        scaler.step(optimizer)
        scaler.update(1024.0)
    return missed, false


def grouped_experts(device: str, folder: Path) -> Figures:
    """Time one layer of experts of Qwen3-30B-A3B, forward and backward, in FP16 and in BF16.

    Transformers' default kernel for Hopper is for BF16 only; what FP16 costs decides how an MoE is trained.
    """
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    figures: Figures = {}
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        config = AutoConfig.for_model(
            "qwen3_moe",
            **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        )
        config._experts_implementation = implementation
        tokens = 8192 if implementation != "batched_mm" else 256  # it copies the weights of every token's experts
        for dtype in (torch.bfloat16, torch.float16):
            with torch.device("cuda"):
                layer = Qwen3MoeSparseMoeBlock(config).to(dtype)
                for parameter in layer.parameters():
                    nn.init.normal_(parameter, std=0.02)
                hidden = torch.randn(1, tokens, 2048, dtype=dtype, requires_grad=True)

            def forward_and_backward(layer: nn.Module = layer, hidden: Tensor = hidden) -> None:
                output = layer(hidden)
                (output[0] if isinstance(output, tuple) else output).sum().backward()

            key = f"{implementation}_{str(dtype).removeprefix('torch.')}_us_per_token"
            figures[key] = timed(forward_and_backward, device, repeats=5) / tokens * 1e6
    return figures


def timed(function: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Return the median seconds of a function, after one call that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])[repeats // 2]
