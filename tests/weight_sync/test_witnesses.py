"""Both witnesses of a weight sync, on real engines: healthy syncs raise nothing. Faults: test_known_faults.py.

`HEALTHY_SYNCS=80 HEALTHY_PAIRS=all python -m pytest -s tests/weight_sync/test_witnesses.py -k healthy` is the long
form: 80 syncs of each of dense, tied, MoE and LoRA models, and of one on a grid of 8 bits, in BF16, FP16 and FP32. With
`VERL_PRECISION_ARITHMETIC=exact` (not with LoRA) vLLM computes in exact arithmetic.
"""

import itertools
import os
import time
from statistics import median

import pytest
import torch
from engine_pair import EnginePair, move, needs_adapters
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from verl_precision.engine.arithmetic_choice import inner_dtype

pytestmark = pytest.mark.usefixtures("vllm_process")

SYNCS = int(os.environ.get("HEALTHY_SYNCS", "6"))  # more than the syncs that the canary learns from
MODELS = {"dense": "qwen3", "tied": "qwen3_tied", "moe": "qwen3_moe", "lora": "qwen3", "fp8": "qwen3"}
PAIRS = [("dense", "bfloat16"), ("tied", "float16"), ("moe", "float32"), ("lora", "float16"), ("fp8", "float16")]
IN_RUNS = PAIRS[:2]  # tests/e2e: test_quickstart.py, test_truncated_sampling.py
if os.environ.get("HEALTHY_PAIRS") == "all":
    PAIRS, IN_RUNS = list(itertools.product(MODELS, ("bfloat16", "float16", "float32"))), []
MARKS = {"lora": [needs_adapters]} | {pair[0]: [pytest.mark.matrix] for pair in IN_RUNS}
CASES = [pytest.param(*pair, marks=MARKS.get(pair[0], ())) for pair in PAIRS]


def _on_a_grid_of_8_bits(patch: pytest.MonkeyPatch) -> None:
    """Have vLLM round linear weights to e4m3, a scale a row, before it packs them: a stand-in for its FP8 kernels."""
    process = UnquantizedLinearMethod.process_weights_after_loading

    def rounded(self, layer):
        weight = layer.weight.data
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        weight.copy_((weight.float() / scales).to(torch.float8_e4m3fn).float() * scales)
        process(self, layer)

    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", rounded)


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_healthy_syncs_raise_nothing(model, dtype, monkeypatch):
    torch.manual_seed(0)
    if model == "fp8":
        _on_a_grid_of_8_bits(monkeypatch)
    pair = EnginePair(MODELS[model], dtype, lora=model == "lora")
    pair.judge.grids = ("fp8",) if model == "fp8" else ()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden() == (inner_dtype() is not None), "the arithmetic asked for"
    guard, canary, worst = [], [], 0.0
    for sync in range(SYNCS):
        move(pair.model, 0.01)
        (report,), start = pair.sync(), time.perf_counter()
        verdict = pair.canary()
        canary.append(time.perf_counter() - start)
        guard.append(report.seconds)
        worst = max(worst, verdict.gap / verdict.bound)
        assert verdict.problems == (), f"sync {sync}; asked again: {pair.canary().problems}"
        if pair.lora:
            assert report.unverified_layers == 0 and report.verified_layers == (35 + 12 if sync == 0 else 12)
        else:
            assert report.unverified_layers == 0 and report.verified_layers > 20
    print(f"\n{model} {dtype}: {SYNCS} syncs, no alarm; largest gap {worst:.2f} of the bound;", end=" ")
    print(f"guard {median(guard):.4f} s, canary {median(canary):.4f} s (medians)")
