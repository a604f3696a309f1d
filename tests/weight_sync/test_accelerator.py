"""The guard as it runs on an accelerator, on vLLM's own models: without a reload, and parameters stay as loaded.

What a CPU does of its own is put aside. The worker's device is not known yet, as vLLM leaves it on some platforms, and
linear and expert kernels keep weights as they are.
"""

import os
import traceback
import weakref
from pathlib import Path

import forked
import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from engine_pair import WorkerPair, move, without
from verl.plugin.platform import set_platform
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from verl_precision.base.errors import WeightSyncError
from verl_precision.integration.cpu.platform import PlatformCPU
from verl_precision.integration.rollout import load_recorder, weight_sync_worker
from verl_precision.weight_sync.manifest import StreamDigest


def like_an_accelerator(patch: pytest.MonkeyPatch) -> None:
    """Have vLLM choose the kernels of an H100 for experts, and none that packs for linear layers."""
    triton = experts.UnquantizedMoeBackend.TRITON
    patch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None)
    patch.setattr(experts, "select_unquantized_moe_backend", lambda moe_config: (triton, TritonExperts))


class AcceleratorPair(WorkerPair):
    """A worker whose weights stay in the layout in which they are loaded."""

    def __init__(self, architecture: str, behind_a_graph: bool = False, **arguments) -> None:
        super().__init__(architecture, "float16", **arguments)
        if behind_a_graph:
            wrapper = object.__new__(CUDAGraphWrapper)  # its constructor asks for a GPU
            wrapper.runnable, wrapper.is_debugging_mode = self.model, False
            self.worker.model_runner.model = wrapper

    def sync(self, **arguments):
        self.worker.device = None
        return super().sync(**arguments)


@pytest.fixture
def pair(vllm_process, monkeypatch):
    like_an_accelerator(monkeypatch)
    return AcceleratorPair


def assert_takes(pair: WorkerPair, syncs: int = 3) -> None:
    """Sync several times; every layer is verified, and nothing stays behind."""
    loaders = {name: getattr(p, "weight_loader", None) for name, p in pair.model.named_parameters()}
    for _ in range(syncs):
        move(pair.trainer)
        report = pair.sync()
        assert report.unverified_layers == 0 and report.verified_layers > 20
    assert {name: getattr(p, "weight_loader", None) for name, p in pair.model.named_parameters()} == loaders


@pytest.mark.parametrize("behind_a_graph", [False, True], ids=["", "cuda_graph"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_syncs_take(pair, architecture, behind_a_graph):
    one = pair(architecture, behind_a_graph)
    assert_takes(one)
    embedding = one.trainer.model.embed_tokens.weight
    assert torch.equal(one.model.model.embed_tokens.weight[: len(embedding)], embedding.half())
    if architecture == "qwen3_moe":
        first = one.trainer.model.layers[0].mlp.experts.down_proj
        assert torch.equal(one.model.get_parameter("model.layers.0.mlp.experts.routed_experts.w2_weight"), first.half())


@pytest.mark.parametrize(("architecture", "parameter"), [
    ("qwen3", "self_attn.qkv_proj.weight"),
    ("qwen3_moe", "mlp.experts.routed_experts.w13_weight"),
])  # fmt: skip
def test_a_parameter_that_is_not_what_was_sent_is_named(pair, architecture, parameter, monkeypatch):
    one = pair(architecture)
    victim = one.model.get_parameter(f"model.layers.1.{parameter}")
    process = "vllm.model_executor.model_loader.utils.process_weights_after_loading"
    monkeypatch.setattr(process, lambda *_: victim.data.view(-1)[7:8].neg_())  # after loading: another kernel's layout
    layer, _, leaf = parameter.rpartition(".")
    with pytest.raises(WeightSyncError, match=rf"layers\.1\.{layer}: {leaf}: 1 of \d+ elements are not those"):
        one.sync()


def test_a_part_of_a_parameter_that_nobody_sends_is_named(pair):
    """Its name counts as loaded: the query's and the value's weights are in the same parameter."""
    one = pair("qwen3")
    move(one.trainer)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.qkv_proj: weight: \d+ of \d+ elements"):
        one.sync(before=without("layers.1.self_attn.k_proj.weight"))


@pytest.mark.parametrize("change", [
    lambda method: setattr(method, "unquantized_backend", type(method.unquantized_backend).FLASHINFER_CUTLASS),
    lambda method: setattr(method, "unquantized_backend", type(method.unquantized_backend).CPU),
    lambda method: setattr(method.moe, "hidden_dim", method.moe.hidden_dim + 64),
], ids=["FLASHINFER_CUTLASS", "CPU", "padded"])  # fmt: skip
def test_experts_whose_weights_a_kernel_shuffles_or_pads_are_not_compared(pair, change):
    layers = [module for module in pair("qwen3_moe").model.modules() if hasattr(module, "w13_weight")]
    assert layers and all(map(load_recorder.comparable, layers))
    for method in {layer.quant_method for layer in layers}:
        change(method)
    assert not any(map(load_recorder.comparable, layers))


def test_a_layer_that_cannot_be_loaded_twice_is_counted_and_the_sync_takes(pair, monkeypatch, caplog):
    monkeypatch.setattr(load_recorder, "_unlike", lambda live: 1 // 0)
    with caplog.at_level("WARNING", logger="verl_precision.weight_sync"):
        report = pair("qwen3").sync()
    assert report.verified_layers == 0 and report.unverified_layers > 20
    assert "lm_head is not verified: it cannot be rebuilt for comparison (ZeroDivisionError" in caplog.text


def test_the_cache_is_given_back_once_the_copies_have_gone(pair, monkeypatch):
    """The KV cache takes the memory next; verl empties the cache while the copies are still there."""
    one, copies, alive = pair("qwen3_moe"), [], []
    fresh_parameter, device = load_recorder.fresh_parameter, weight_sync_worker.get_torch_device()

    def remembered(*arguments):
        copies.append(weakref.ref(fresh := fresh_parameter(*arguments)))
        return fresh

    monkeypatch.setattr(load_recorder, "fresh_parameter", remembered)
    monkeypatch.setattr(device, "empty_cache", lambda: alive.append(sum(copy() is not None for copy in copies)))
    one.sync()
    assert len(copies) > 20 and alive[-1] == 0, f"{len(copies)} copies; alive whenever the cache is emptied: {alive}"


def test_what_is_kept_is_this_ranks_part_in_the_rollouts_dtype(pair, monkeypatch):
    """The trainer sends whole tensors in FP32: four times as many bytes at tensor parallel 2."""
    one, kept, verify = pair("qwen3"), [], weight_sync_worker.verify
    find_damage = verify.find_damage
    monkeypatch.setattr(verify, "find_damage", lambda *args, **k: kept.append(args[1]) or find_damage(*args, **k))
    one.sync()
    assert kept and not any(record.calls for record in kept)
    assert all(record.loaded[name].dtype == torch.float16 for record in kept for name in record.template)


def test_nothing_is_digested_where_no_manifest_comes(pair, monkeypatch):
    monkeypatch.setattr(StreamDigest, "add", lambda self, name, tensor: 1 // 0)
    pair("qwen3").sync(manifest=False)


def one_of_two(rank: int, folder: str) -> None:
    set_platform(PlatformCPU())
    torch.set_num_threads(1)
    try:
        with set_current_vllm_config(VllmConfig()), pytest.MonkeyPatch.context() as patch:
            like_an_accelerator(patch)
            init_distributed_environment(2, rank, f"file://{folder}/rendezvous", rank, backend="gloo")
            initialize_model_parallel(2, 1)
            for architecture in ("qwen3_tied", "qwen3_moe"):
                pair = AcceleratorPair(architecture, tensor_parallel_size=2)
                part, whole = (one.model.layers[0].self_attn.o_proj.weight for one in (pair.model, pair.trainer))
                assert part.shape[1] * 2 == whole.shape[1]
                assert_takes(pair, syncs=2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.e2e
def test_syncs_take_with_tensor_parallel_2(tmp_path):
    """Each rank holds half a model, in a new process: one that is forked from this one hangs by torch's locks."""
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script = f"import sys\nsys.path += {folders!r}\nfrom test_accelerator import one_of_two\none_of_two("
    ident = f"vp{os.getpid()}"
    forked.ranks(2, lambda rank: f"{script}{rank}, {str(tmp_path)!r})", tmp_path, VLLM_DIST_IDENT=ident)
