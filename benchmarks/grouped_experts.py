"""Time of an MoE layer in FP16 and BF16 with each way that transformers has to compute its experts.

    python benchmarks/grouped_experts.py                     # on CUDA: Qwen3-30B-A3B's shapes; else tiny ones
    python benchmarks/grouped_experts.py --json experts.json

One `Qwen3MoeSparseMoeBlock` of the installed transformers with random weights, forward and backward, medians. `waits`
is how often the host waits for the GPU in forward and backward, as torch's sync debug mode counts it. `error` is the
output's distance from an FP32 block with the same weights, relative to its norm; a token whose router logits round
across a boundary has other experts. `batched_mm` copies an expert's weights for each token that the expert gets. It is
left out where the copies would fill a quarter of the memory.
"""

import argparse
import copy
import json
import statistics
import time
import warnings
from pathlib import Path

import psutil
import torch
import transformers
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QWEN3_30B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def main() -> None:
    arguments = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    shape, tokens = (QWEN3_30B, arguments.tokens or 8192) if on_gpu else (TINY, arguments.tokens or 256)
    rows = measure(shape, tokens, device, arguments.repeats)
    machine = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}; torch {torch.__version__}, transformers {transformers.__version__}; {tokens} tokens, {shape}")
    print("| experts | dtype | forward, ms | forward and backward, ms | ratio to grouped_mm in BF16 | waits | error |")
    print("|---" * 7 + "|")
    first = rows[0]["total"]
    for row in rows:
        name = f"| {row['experts']} | {row['dtype']} |"
        if reason := row.get("not_run"):
            print(name, f"not run: {reason} | | | | |")
            continue
        waits = "" if row["waits"] is None else row["waits"]
        print(
            name,
            f"{row['forward']:.2f} | {row['total']:.2f} | {row['total'] / first:.2f} | {waits} | {row['error']:.1e} |",
        )
    if arguments.json:
        found = {"machine": machine, "torch": torch.__version__, "transformers": transformers.__version__}
        arguments.json.write_text(
            json.dumps({**found, "tokens": tokens, "shape": shape, "rows": rows}, indent=2) + "\n"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="tokens of the batch (default 8192, on a CPU 256)")
    parser.add_argument("--repeats", type=int, default=9, help="timed forwards and backwards of each (default 9)")
    parser.add_argument("--json", type=Path, help="file to write the same to, for machines")
    return parser.parse_args()


def measure(shape: dict[str, int], tokens: int, device: torch.device, repeats: int) -> list[dict]:
    """Return a row for each implementation and dtype; the first is grouped_mm in BF16."""
    torch.manual_seed(0)
    exact = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**shape, norm_topk_prob=True)).to(device)
    for parameter in exact.parameters():  # transformers leaves them empty, and the router's at zero
        torch.nn.init.normal_(parameter, std=shape["hidden_size"] ** -0.5)
    hidden = torch.randn(1, tokens, shape["hidden_size"], device=device)
    exact.experts.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = exact(hidden)
    rows = []
    for implementation in IMPLEMENTATIONS:
        for name, dtype in DTYPES.items():
            row = {"experts": implementation, "dtype": name}
            copies = (
                3 * tokens * shape["num_experts_per_tok"] * shape["hidden_size"] * shape["moe_intermediate_size"] * 2
            )
            if implementation == "batched_mm" and copies > memory(device) / 4:
                rows.append({**row, "not_run": f"it would copy {copies / 2**30:.0f} GiB of weights"})
                continue
            block = copy.deepcopy(exact).to(dtype)
            block.experts.config._experts_implementation = implementation
            rows.append({**row, **time_block(block, hidden.to(dtype), repeats)})
            with torch.no_grad():
                rows[-1]["error"] = float((block(hidden.to(dtype)).float() - expected).norm() / expected.norm())
    return rows


def memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info()[1] if device.type == "cuda" else psutil.virtual_memory().total


def time_block(block: torch.nn.Module, hidden: torch.Tensor, repeats: int) -> dict:
    """Return the medians in milliseconds, and how often the host waits."""
    hidden.requires_grad_()
    slope = torch.randn_like(hidden)

    def run() -> tuple[float, float]:
        block.zero_grad()
        start = now(hidden.device)
        output = block(hidden)
        middle = now(hidden.device)
        output.backward(slope)
        return (middle - start) * 1e3, (now(hidden.device) - start) * 1e3

    for _ in range(2):
        run()  # warms up
    forwards, totals = zip(*(run() for _ in range(repeats)), strict=True)
    return {
        "forward": statistics.median(forwards),
        "total": statistics.median(totals),
        "waits": waits(block, hidden, slope),
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def waits(block: torch.nn.Module, hidden: torch.Tensor, slope: torch.Tensor) -> int | None:
    """Count the operations that make the host wait for the GPU; None on a CPU."""
    if hidden.device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            block(hidden).backward(slope)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


if __name__ == "__main__":
    main()
