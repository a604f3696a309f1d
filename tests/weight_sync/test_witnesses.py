"""Both witnesses of a weight sync, on real engines: healthy syncs raise nothing, each planted fault is named.

Faults that the bits see without an engine are in test_worker.py.

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
from engine_pair import EnginePair, move, without
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from verl_precision.base.errors import WeightSyncError
from verl_precision.base.versions import installed_vllm, loads_adapters
from verl_precision.engine.arithmetic_choice import inner_dtype
from verl_precision.weight_sync.canary import LEARNING_SYNCS

pytestmark = pytest.mark.usefixtures("vllm_process")

SYNCS = int(os.environ.get("HEALTHY_SYNCS", "6"))  # more than the syncs that the canary learns from
MODELS = {"dense": "qwen3", "tied": "qwen3_tied", "moe": "qwen3_moe", "lora": "qwen3", "fp8": "qwen3"}
VLLM = installed_vllm()
CANNOT = f"verl 0.9.1 cannot load a LoRA adapter into vLLM {VLLM} (adapter-not-loadable in docs/precision.md)"
needs_adapters = pytest.mark.skipif(VLLM is not None and not loads_adapters(VLLM), reason=CANNOT)
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


@pytest.fixture(scope="module")
def dense() -> EnginePair:
    """Two replicas in FP16 whose canary has learned its bound from healthy syncs."""
    pair = EnginePair("qwen3", "float16", replicas=2)
    for _ in range(LEARNING_SYNCS):
        move(pair.model, 0.01)
        _is_healthy(pair)
    return pair


@pytest.fixture(scope="module")
def adapted() -> EnginePair:
    """A LoRA adapter with an effect, in good health after one sync."""
    pair = EnginePair("qwen3", "float16", lora=True)
    move(pair.model, 0.3)
    _is_healthy(pair)
    return pair


def _is_named(pair: EnginePair, replica: int) -> tuple[str, ...]:
    problems = pair.canary().problems
    assert problems and all(problem.startswith(f"replica {replica}: ") for problem in problems), problems
    return problems


def _is_healthy(pair: EnginePair) -> None:
    pair.sync()
    assert pair.canary().problems == ()


def test_one_of_two_replicas_stale_is_named_by_the_canary(dense):
    _is_healthy(dense)
    move(dense.model)
    dense.sync(only=[0])
    assert any("to the last bit" in problem for problem in _is_named(dense, replica=1))
    _is_healthy(dense)


def test_weights_changed_after_the_guard_looked_are_named_by_the_canary(dense):
    """Memory overwritten, a graph over old memory, a kernel that nobody repacked: bits have nothing to say of it."""
    assert dense.sync()[0].unverified_layers == 0
    dense.engines[1].apply_model(lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(1.1))
    _is_named(dense, replica=1)
    _is_healthy(dense)


def _exchange_two_experts(model) -> None:
    for name, parameter in model.named_parameters():
        if "layers.1." in name and name.endswith(("w13_weight", "w2_weight")):
            parameter.data[[0, 1]] = parameter.data[[1, 0]].clone()


def test_two_experts_of_one_layer_that_change_places_are_named_by_the_canary():
    """Experts in another layout are named by the bits, where it is known: tests/weight_sync/test_worker.py."""
    pair = EnginePair("qwen3_moe", "float16")
    for _ in range(LEARNING_SYNCS):
        move(pair.model, 0.01)
        _is_healthy(pair)
    pair.engines[0].apply_model(_exchange_two_experts)
    _is_named(pair, replica=0)
    pair.engines[0].apply_model(_exchange_two_experts)
    assert pair.canary().problems == ()


@needs_adapters
def test_an_adapter_that_vllm_does_not_hold_is_named_by_the_bits(adapted, monkeypatch):
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.add_lora", lambda self, request: None)
    move(adapted.model, 0.3)
    with pytest.raises(WeightSyncError, match="LoRA adapter 123: vLLM does not hold it"):
        adapted.sync()
    monkeypatch.undo()
    adapted.sync()


@needs_adapters
def test_a_missing_adapter_is_named_by_the_canary(adapted):
    _is_healthy(adapted)
    adapted.engines[0].llm_engine.remove_lora(123)
    _is_named(adapted, replica=0)
    adapted.sync()


@needs_adapters
def test_a_missing_part_of_the_adapter_is_named_by_the_bits(adapted):
    with pytest.raises(WeightSyncError, match=r"layers\.2\.self_attn\.q_proj\.lora_A\.weight: sent by the trainer"):
        adapted.sync(damage=without(".layers.2.self_attn.q_proj."))
