"""Time of an MoE layer in FP16 and BF16 with each of transformers' implementations of experts.

    python benchmarks/grouped_experts.py  # on CUDA: Qwen3-30B-A3B's shapes; otherwise tiny shapes

One `Qwen3MoeSparseMoeBlock` of the installed transformers with random weights, forward and backward, beside `eager`,
transformers' loop. Waits: the number of times that the host waits for the GPU, as torch's sync debug mode counts them.
Error: the output's distance from the output of an FP32 block with the same weights, relative to its norm. A token has
other experts if rounding changes the order of its router logits. `batched_mm` copies an expert's weights for each of
the expert's tokens. It is left out if the copies would fill a quarter of the memory.
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import torch
from measure import Record, alternate, parser, record, report
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from verl_precision.base.dtypes import HALF, torch_dtype

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
QWEN3_30B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, repeats=9)
    arguments.add_argument("--tokens", type=int, help="tokens of the batch (default 8192, on a CPU 256)")
    return arguments.parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    shape, tokens = (QWEN3_30B, arguments.tokens or 8192) if on_gpu else (TINY, arguments.tokens or 256)
    torch.manual_seed(0)
    exact = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**shape, norm_topk_prob=True)).to(device)
    for parameter in exact.parameters():  # transformers leaves these empty, and the router at zero
        torch.nn.init.normal_(parameter, std=shape["hidden_size"] ** -0.5)
    hidden = torch.randn(1, tokens, shape["hidden_size"], device=device)
    slope = torch.randn_like(hidden)
    exact.experts.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = exact(hidden)
    copies = 3 * tokens * shape["num_experts_per_tok"] * shape["hidden_size"] * shape["moe_intermediate_size"] * 2
    small = copies <= memory(device) / 4
    for name, dtype in ((name, torch_dtype(name)) for name in HALF):
        blocks = {}
        for implementation in IMPLEMENTATIONS if small else IMPLEMENTATIONS[:-1]:
            blocks[implementation] = copy.deepcopy(exact).to(dtype)
            blocks[implementation].experts.config._experts_implementation = implementation
        x, gradient = hidden.to(dtype).requires_grad_(), slope.to(dtype)
        calls = {key: partial(step, block, x, gradient) for key, block in blocks.items()}
        times = alternate(calls, arguments.repeats)
        for key in list(blocks)[1:]:
            with torch.no_grad():
                error = float((blocks[key](x).float() - expected).norm() / expected.norm())
            what = f"experts of an MoE layer, {key}, {name}, {tokens} tokens"
            noted = f"{waits(calls[key])} waits; error {error:.1e}"
            yield record(what, "eager", "ms", times[key], times["eager"], growth=noted)


def step(block: torch.nn.Module, hidden: torch.Tensor, slope: torch.Tensor) -> None:
    block(hidden).backward(slope)


def memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info()[1] if device.type == "cuda" else psutil.virtual_memory().total


def waits(call: Callable[[], None]) -> int:
    """Count the operations that make the host wait for the GPU."""
    if not torch.cuda.is_available():
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


if __name__ == "__main__":
    report(records(given := parse()), given.json)
