"""Part A, as far as torch alone shows it: overflows under offloading, log-probs, digest, experts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from verl_precision.base.errors import require
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.loss_scaling import LossScaler, local_part
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.tools.checking.installation import findings
from verl_precision.tools.selftest.checks import Figures
from verl_precision.weight_sync import manifest

GIB = 2**30
_OVERFLOWS, _SCALE = 500, 1024.0


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


def digest(device: str, folder: Path) -> Figures:
    """Flip one bit of a large tensor and compare digests; time the digest beside a copy of the same bytes."""
    elements, small_tensors = (2**31, 19000) if device == "cuda" else (2**27, 2000)
    large = torch.empty(elements, dtype=torch.bfloat16, device=device)
    for part in large.split(2**26):
        part.copy_(torch.randn(part.shape, device=device))
    first = manifest.digest(large)
    bits = manifest.bit_view(large)
    bits[elements // 3] ^= 1
    require(manifest.digest(large) != first, "a flipped bit of a large tensor was not seen")
    bits[elements // 3] ^= 1
    require(manifest.digest(large) == first, "the same tensor has two digests")
    copied = torch.empty_like(large)
    seconds, copy_seconds = timed(lambda: manifest.digest(large), device), timed(lambda: copied.copy_(large), device)
    small = list(large[: small_tensors * 4096].view(small_tensors, 64, 64))

    def stream() -> None:
        digests = manifest.StreamDigest()
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
    """Plant 500 overflows in gradients on the host while the GPU is busy; count those that each scaler misses.

    Under `offload_policy` torch's scaler copies 1/S and its found-inf flag to the host and does not wait for them. What
    it misses depends on the machine, and is reported. Ours must miss nothing.
    """
    from verl_precision.integration.engine.single_rank import one_rank

    never = 10**9
    with one_rank("cuda"):
        theirs = _planted(ShardedGradScaler("cuda", init_scale=_SCALE, growth_interval=never))
        ours = _planted(LossScaler(LossScaleSettings(initial=_SCALE, growth_interval=never), "cuda"))
    problem = ", ".join(f"{key} {value}" for key, value in ours.items())
    require(not any(ours.values()), f"of {_OVERFLOWS} overflows: {problem}", "Keep offload_policy=False here.")
    counted = (("torch", theirs), ("ours", ours))
    return {f"{name}_{key}": value for name, counts in counted for key, value in counts.items()}


def _planted(scaler: ShardedGradScaler) -> dict[str, int]:
    """Plant an infinite element in one gradient of each step but the first and the last, and count.

    `missed` are overflows after which the step was not skipped; `misread`, steps whose finite gradients were not
    divided by the scale; `false_alarms`, steps without an overflow that were skipped.
    """
    width = 64
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    sharding: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for module in [*model, model]:
        fully_shard(module, **sharding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    busy, inputs = torch.randn(4096, 4096, device="cuda").half(), torch.randn(8, width, device="cuda")
    counts = {"missed": 0, "misread": 0, "false_alarms": 0}
    for step in range(_OVERFLOWS + 2):
        planted = 0 < step <= _OVERFLOWS
        optimizer.zero_grad()
        scaler.scale(model(inputs).float().square().mean()).backward()
        first, last = [local_part(p.grad) for p in model.parameters() if p.grad is not None and p.dim() == 2]
        expected = first / scaler.get_scale()  # get_scale waits: the stream is empty from here on
        if planted:
            last.view(-1)[step % last.numel()] = float("inf")
        for _ in range(40):  # some 10 ms of an H100
            torch.mm(busy, busy)
        scaler.unscale_(optimizer)
        torch.cuda.synchronize()  # by now every copy has arrived
        counts["misread"] += not torch.allclose(first, expected)
        skips = any(float(flag) for flag in scaler._found_inf_per_device(optimizer).values())
        counts["missed"] += planted and not skips
        counts["false_alarms"] += skips and not planted
        scaler.step(optimizer)
        scaler.update(_SCALE)
    return counts


def grouped_experts(device: str, folder: Path) -> Figures:
    """Time one layer of experts of Qwen3-30B-A3B, forward and backward, 8,192 tokens, in FP16 and in BF16.

    Torch's grouped product has a kernel for BF16 only on Hopper; what FP16 costs decides how an MoE is trained.
    `benchmarks/grouped_experts.py` compares the other ways to compute experts.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shape = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    figures: Figures = {}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.device("cuda"):
            layer = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**shape, experts_implementation="grouped_mm")).to(dtype)
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.02)
            hidden = torch.randn(1, 8192, shape["hidden_size"], dtype=dtype, requires_grad=True)

        def forward_and_backward(layer: nn.Module = layer, hidden: Tensor = hidden) -> None:
            output = layer(hidden)
            (output[0] if isinstance(output, tuple) else output).sum().backward()

        figures[f"{str(dtype).removeprefix('torch.')}_ms"] = timed(forward_and_backward, device, repeats=5) * 1e3
    figures["times"] = float(figures["float16_ms"]) / float(figures["bfloat16_ms"])
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
