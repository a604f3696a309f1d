"""Both witnesses of a weight sync, on real engines: healthy syncs raise nothing, each planted fault is named.

`HEALTHY_SYNCS=100 HEALTHY_PAIRS=all python -m pytest -s tests/weight_sync/test_witnesses.py -k healthy` is the long
form: 100 syncs of each of dense, tied, MoE and LoRA models in BF16, FP16 and FP32.
"""

import itertools
import os
import time

import pytest
import torch
from engine_pair import EnginePair

from verl_precision.errors import WeightSyncError
from verl_precision.versions import installed_vllm, loads_adapters
from verl_precision.weight_sync.canary import LEARNING_SYNCS

pytestmark = pytest.mark.usefixtures("vllm_process")

SYNCS = int(os.environ.get("HEALTHY_SYNCS", "6"))  # more than the syncs that the canary learns from
DTYPES = ("bfloat16", "float16", "float32")
MODELS = {
    "dense": ("qwen3", False),
    "tied": ("qwen3_tied", False),
    "moe": ("qwen3_moe", False),
    "lora": ("qwen3", True),
}
VLLM = installed_vllm()
needs_adapters = pytest.mark.skipif(
    VLLM is not None and not loads_adapters(VLLM),
    reason=f"verl 0.9.1 cannot load a LoRA adapter into vLLM {VLLM} (adapter-not-loadable in docs/precision.md)",
)
PAIRS = (
    list(itertools.product(MODELS, DTYPES))
    if os.environ.get("HEALTHY_PAIRS") == "all"
    else [("dense", "bfloat16"), ("tied", "float16"), ("moe", "float32"), ("lora", "bfloat16")]
)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [pytest.param(model, dtype, marks=needs_adapters if MODELS[model][1] else ()) for model, dtype in PAIRS],
)
def test_healthy_syncs_raise_nothing(model, dtype):
    torch.manual_seed(0)
    architecture, lora = MODELS[model]
    pair = EnginePair(architecture, dtype, lora=lora)
    guard, canary, worst = [], [], 0.0
    for sync in range(SYNCS):
        pair.update(size=0.01)
        (report,) = pair.sync()
        start = time.perf_counter()
        verdict = pair.canary()
        canary.append(time.perf_counter() - start)
        guard.append(report.seconds)
        worst = max(worst, verdict.gap / verdict.bound)
        assert verdict.problems == (), f"sync {sync}; {_circumstances(pair)}"
        if lora:
            assert report.unverified_layers == 12 and report.verified_layers == (35 if sync == 0 else 0)
        else:
            assert report.unverified_layers == 0 and report.verified_layers > 20
    middle = SYNCS // 2
    print(
        f"\n{model} {dtype}: {SYNCS} syncs, no alarm; largest gap {worst:.2f} of the bound; "
        f"guard {sorted(guard)[middle]:.4f} s, canary {sorted(canary)[middle]:.4f} s (medians)"
    )


def _circumstances(pair: EnginePair) -> str:
    """Say what a false alarm may come from: does it last, and what has this process been set to?"""
    return (
        f"asked again: {pair.canary().problems}; float32 products {torch.get_float32_matmul_precision()!r}, "
        f"autocast {torch.is_autocast_enabled('cpu')}, default {torch.get_default_dtype()}, "
        f"{torch.get_num_threads()} threads, experts {pair.model.config._experts_implementation!r}"
    )


@pytest.fixture(scope="module")
def dense() -> EnginePair:
    """Two replicas in FP16 whose canary has learned its bound from healthy syncs."""
    pair = EnginePair("qwen3", "float16", replicas=2)
    for _ in range(LEARNING_SYNCS):
        pair.update(0.01)
        pair.sync()
        assert pair.canary().problems == ()
    return pair


@pytest.fixture(scope="module")
def adapted() -> EnginePair:
    """A LoRA adapter with an effect, in good health after one sync."""
    pair = EnginePair("qwen3", "float16", lora=True)
    pair.update(0.3)
    pair.sync()
    assert pair.canary().problems == ()
    return pair


def _flip_one_bit(stream):
    for name, tensor in stream:
        if name.endswith("layers.3.mlp.up_proj.weight"):
            tensor = tensor.clone()
            tensor.view(torch.int32)[5, 7] ^= 1
        yield name, tensor


def _rounded(stream):
    for name, tensor in stream:
        yield name, tensor.bfloat16() if tensor.is_floating_point() else tensor


def _without_one(stream):
    return ((name, tensor) for name, tensor in stream if ".layers.2.self_attn.q_proj." not in name)


def test_one_flipped_bit_is_named_by_the_bits(dense):
    with pytest.raises(WeightSyncError, match=r"layers\.3\.mlp\.up_proj\.weight: .* arrived with other values"):
        dense.sync(only=[0], damage=_flip_one_bit)
    dense.sync()


def test_a_bf16_sender_into_fp16_is_named_by_the_bits(dense, monkeypatch):
    sent = [(name, tensor.bfloat16()) for name, tensor in dense.model.state_dict().items()]
    monkeypatch.setattr("engine_pair._full_weights", lambda model: sent)
    with pytest.raises(WeightSyncError, match="arrived in bfloat16, too coarse for a rollout in float16"):
        dense.sync(only=[0])
    monkeypatch.undo()
    dense.sync()


def test_one_layer_not_loaded_is_named_by_the_bits(dense):
    with pytest.raises(WeightSyncError, match=r"layers\.2\.self_attn\.q_proj\.weight: sent by the trainer, never"):
        dense.sync(only=[0], damage=_without_one)
    dense.sync()


def test_one_of_two_replicas_stale_is_named_by_the_canary(dense):
    dense.sync()
    assert dense.canary().problems == ()
    dense.update(0.02)
    dense.sync(only=[0])
    problems = dense.canary().problems
    assert problems and all(problem.startswith("replica 1: ") for problem in problems)
    assert any("to the last bit" in problem for problem in problems)
    dense.sync()
    assert dense.canary().problems == ()


def test_weights_changed_after_the_guard_looked_are_named_by_the_canary(dense):
    """Memory overwritten, a graph over old memory, a kernel that nobody repacked: bits have nothing to say of it."""
    (report, _) = dense.sync()
    assert report.unverified_layers == 0

    def overwrite(worker):
        worker.model_runner.model.model.layers[1].input_layernorm.weight.data.mul_(3)

    dense.engines[1].collective_rpc(overwrite)
    problems = dense.canary().problems
    assert problems and all(problem.startswith("replica 1: ") for problem in problems)
    dense.sync()
    assert dense.canary().problems == ()


def test_permuted_experts_are_named_by_the_canary():
    """By the bits as well, where the experts' layout is known: tests/weight_sync/test_worker.py."""
    pair = EnginePair("qwen3_moe", "float16")
    pair.update(0.1)
    pair.sync()
    assert pair.canary().problems == ()

    def permute(worker):
        for name, parameter in worker.model_runner.model.named_parameters():
            if name.endswith("w2_weight"):
                parameter.data.copy_(parameter.data.flip(0))

    pair.engines[0].collective_rpc(permute)
    assert pair.canary().problems


@needs_adapters
def test_an_adapter_that_vllm_does_not_hold_is_named_by_the_bits(adapted, monkeypatch):
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.add_lora", lambda self, request: None)
    adapted.update(0.3)
    with pytest.raises(WeightSyncError, match="LoRA adapter 123: vLLM does not hold it"):
        adapted.sync()
    monkeypatch.undo()
    adapted.sync()


@needs_adapters
def test_a_missing_adapter_is_named_by_the_canary(adapted):
    adapted.sync()
    assert adapted.canary().problems == ()
    adapted.engines[0].llm_engine.remove_lora(123)
    assert adapted.canary().problems
    adapted.sync()


@needs_adapters
def test_a_missing_part_of_the_adapter_is_named_by_the_bits(adapted):
    with pytest.raises(WeightSyncError, match=r"layers\.2\.self_attn\.q_proj\.lora_A\.weight: sent by the trainer"):
        adapted.sync(damage=_without_one)
