"""The worker extension on real vLLM models, fed by verl's real sender: what takes passes, what does not is named."""

import asyncio
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from verl.plugin.platform import set_platform

from verl_precision.errors import WeightSyncError
from verl_precision.platforms.cpu import PlatformCPU
from verl_precision.tiny_model import cached_tiny_model
from verl_precision.weight_sync.manifest import send_with_manifest


@pytest.fixture(scope="module", autouse=True)
def vllm_process() -> Iterator[None]:
    """Make this process a vLLM worker of one: CPU platform, world of size 1."""
    import socket

    set_platform(PlatformCPU())
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


def _worker(architecture: str, dtype: str):
    """Return our extension over a vLLM model loaded as verl loads it (random weights), and the trainer's weights."""
    from transformers import AutoModelForCausalLM
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from verl_precision.weight_sync.worker import VerifiedWeightSyncExtension

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


def _sync(worker, config, weights) -> None:
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_sync_takes_twice_and_the_head_follows(architecture, dtype):
    worker, trainer, config = _worker(architecture, dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        _sync(worker, config, send_with_manifest(_weights(trainer)))
        assert _logits_gap(worker, trainer) < tolerance


def test_tied_head_stays_stale_without_the_fix_and_the_guard_names_it(monkeypatch):
    """Upstream's reload leaves the tied head's repacked copy as it was; nothing in verl or vLLM notices."""
    worker, trainer, config = _worker("qwen3_tied", "float32")
    monkeypatch.setattr("verl_precision.platforms.vllm_cpu.shared_parameter_layers", lambda model: iter(()))
    with pytest.raises(WeightSyncError, match="lm_head: it computes with a repacked copy of other weights"):
        _sync(worker, config, send_with_manifest(_weights(trainer)))
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
        _sync(worker, config, damage(send_with_manifest(_weights(trainer))))


def test_quantised_rollout_is_checked_for_arrival_only(monkeypatch, caplog):
    """It stores other tensors than it is sent (scales among them): no false alarm, and one warning."""
    from verl_precision.weight_sync import worker as module

    worker, trainer, config = _worker("qwen3", "float32")
    monkeypatch.setattr(module, "is_quantized_model", lambda vllm_config: True)
    worker._is_qat_model = True  # for verl: load nothing here, its quantised loaders need a quantised model
    monkeypatch.setattr("verl.utils.qat.prepare_qat_for_load_weights", lambda *args, **kwargs: None)
    monkeypatch.setattr("verl.utils.qat.manual_process_weights_after_loading", lambda *args, **kwargs: None)
    upstream = module.vLLMColocateWorkerExtension
    monkeypatch.setattr(upstream, "_update_weights", lambda self, weights, peft_config, base_sync_done: None)
    with caplog.at_level("WARNING", logger="verl_precision.weight_sync"):
        _sync(worker, config, send_with_manifest(_weights(trainer)))
    assert "checked for arrival only" in caplog.text
    with pytest.raises(WeightSyncError, match="never received"):
        _sync(worker, config, _drop_one(send_with_manifest(_weights(trainer))))


def test_missing_weight_is_named_even_without_a_manifest():
    worker, trainer, config = _worker("qwen3", "float32")
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.q_norm\.weight: no tensor .* was loaded"):
        _sync(worker, config, _drop_one(_weights(trainer)))


def test_reload_that_keeps_old_values_is_named(monkeypatch):
    """Everything arrives and every parameter is "loaded", yet the layers keep what they had."""
    from vllm.model_executor.model_loader.reload import layerwise

    worker, trainer, config = _worker("qwen3", "float32")
    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", layerwise._place_kernel_tensors)
    with pytest.raises(WeightSyncError, match=r"norm: weight: \d+ of \d+ elements are not those that were sent"):
        _sync(worker, config, send_with_manifest((n, t + 0.5) for n, t in _weights(trainer)))


def test_reload_that_cannot_start_reaches_the_caller_and_the_sender_is_answered(monkeypatch):
    from vllm.model_executor.model_loader import reload

    def broken(model):
        raise RuntimeError("no reload today")

    worker, trainer, config = _worker("qwen3", "float32")
    monkeypatch.setattr(reload, "initialize_layerwise_reload", broken)
    with pytest.raises(RuntimeError, match="no reload today"):
        _sync(worker, config, send_with_manifest(_weights(trainer)))


def test_loading_error_reaches_the_caller_and_the_sender_is_answered(caplog):
    worker, trainer, config = _worker("qwen3", "float32")
    wrong = [(n, t[:1] if n.endswith("layers.0.mlp.down_proj.weight") else t) for n, t in _weights(trainer)]
    with pytest.raises((AssertionError, RuntimeError)) as caught:  # vLLM's own error, of vLLM's own type
        _sync(worker, config, send_with_manifest(wrong))
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
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        _sync(worker, config, send_with_manifest(_weights(trainer)))
        assert _experts_gap(worker, config, trainer) < {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]


def test_experts_stay_unpacked_without_the_fix_and_the_guard_names_them(monkeypatch):
    """Upstream packs expert weights for its CPU kernel at the first load only; verl and vLLM go on without a word."""
    worker, trainer, config = _worker("qwen3_moe", "float32")
    monkeypatch.setattr("verl_precision.platforms.vllm_cpu.forget_expert_kernel", lambda layer: None)
    with pytest.raises(WeightSyncError, match=r"experts.*w13_weight: \d+ of \d+ elements are not those that were sent"):
        _sync(worker, config, send_with_manifest(_weights(trainer)))
    assert _experts_gap(worker, config, trainer) > 0.5, "the experts really compute with other weights"
