"""Faults of weight syncs that others ran into: each is named within two syncs, with its tensor or replica.

Each test says what the thread saw, plants that in real vLLM engines fed by verl's real sender, and asserts which
witness names it: the bits (an error inside the sync) or the canary (log-probs after it). A stand-in is said to be one:
for a layout of NVIDIA's kernels, and for an image.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from engine_pair import EnginePair, full_weights, move, needs_adapters
from test_accelerator import AcceleratorPair, like_an_accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils.fsdp_utils import normalize_peft_param_name
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as upstream
from vllm.model_executor.model_loader import reload

from verl_precision.base.errors import WeightSyncError
from verl_precision.tools.tiny_model import cached_tiny_model
from verl_precision.weight_sync.canary import LEARNING_SYNCS, CanaryJudge

pytestmark = pytest.mark.usefixtures("vllm_process")

SMALL, LARGE = 0.001, 0.02  # updates: within a healthy gap, and far outside it


@pytest.fixture(scope="module")
def four() -> EnginePair:
    """Four replicas in FP16 whose canary has learned its bound."""
    return _learned(EnginePair("qwen3", "float16", replicas=4))


@pytest.fixture(scope="module")
def moe() -> EnginePair:
    """A mixture of experts in FP16 whose canary has learned its bound."""
    pair = EnginePair("qwen3_moe", "float16")
    move(pair.model, 0.1)
    return _learned(pair)


@pytest.fixture(scope="module")
def adapted() -> EnginePair:
    """A LoRA adapter with an effect, in good health after one sync."""
    pair = EnginePair("qwen3", "float16", lora=True)
    move(pair.model, 0.3)
    pair.sync()
    assert pair.canary().problems == ()
    return pair


@pytest.fixture
def lone(four) -> Iterator[EnginePair]:
    """One replica by itself, in good health, with a canary that has seen nothing yet."""
    pair = copy.copy(four)
    pair.engines, pair.judge = four.engines[:1], CanaryJudge(torch.float16, torch.float16)
    pair.sync()
    yield pair
    pair.sync()
    assert pair.canary().problems == (), "the replica is well again after the test"


def _learned(pair: EnginePair) -> EnginePair:
    for _ in range(LEARNING_SYNCS):
        move(pair.model, 0.01)
        pair.sync()
        assert pair.canary().problems == ()
    return pair


def _named_within_two_syncs(pair: EnginePair, after_the_sync: Callable[[], object], update: float, words: str) -> None:
    """Assert that the canary names replica 0 after the first or the second sync."""
    problems: tuple[str, ...] = ()
    for _ in range(2):
        move(pair.model, update)
        pair.sync()
        after_the_sync()
        if problems := pair.canary().problems:
            break
    assert problems and problems[0].startswith("replica 0: ") and words in " ".join(problems), problems


def _worker(pair: EnginePair) -> object:
    (worker,) = pair.engines[0].collective_rpc(lambda self: self)
    return getattr(worker, "worker", worker)


@needs_adapters
def test_a_disaggregated_sync_that_sends_no_adapter(monkeypatch):
    """verl#7495: every sync brings the frozen base model and `list_loras()` stays empty; it looks like staleness."""
    pair = EnginePair("qwen3", "float16", lora=True)
    base = {name: tensor for name, tensor in pair.model.state_dict().items() if "lora_" not in name}
    monkeypatch.setattr(pair, "_streams", lambda rank: [(normalize_peft_param_name(base).items(), {})])
    pair.sync()
    assert pair.canary().problems == (), "the adapter has no effect yet"
    move(pair.model, 0.1)
    with pytest.raises(WeightSyncError, match="LoRA adapter 123: 2 weight streams brought base weights and none an"):
        pair.sync()
    (problem,) = pair.canary().problems[-1:]
    assert "replica 0: its log-probs did not change at all" in problem


def test_experts_whose_layout_the_loader_cannot_write(monkeypatch):
    """verl#7978: FlashInfer's TRT-LLM kernel makes expert weights 4-D. Stand-in: the shape alone, on an H100's path."""
    like_an_accelerator(monkeypatch)
    pair = AcceleratorPair("qwen3_moe")
    for layer in pair.model.modules():
        if hasattr(layer, "w13_weight"):
            weight = layer.w13_weight
            weight.data = weight.data.unflatten(2, (-1, 16)).transpose(1, 2).contiguous()
    with pytest.raises(
        WeightSyncError, match=r"sync 0 did not take: model\.layers\.0\.mlp\.experts\.\d\.\w+\.weight: "
    ):
        pair.sync()


def test_encoder_outputs_of_the_weights_before(lone):
    """verl#6523: outputs of image encoders stay cached over a sync. Stand-in: an image, for a text model's runner."""
    runner = _worker(lone).model_runner
    runner.encoder_cache["an-image"] = torch.zeros(4, 64)
    lone.sync()
    with pytest.raises(WeightSyncError, match=r"encoder output an-image: from before weight sync \d+, used after"):
        lone.sync()
    lone.engines[0].llm_engine.reset_encoder_cache()  # as verl's clear_kv_cache does
    runner.encoder_cache["an-image"] = torch.zeros(4, 64)  # the same image, encoded anew
    lone.sync()
    runner.encoder_cache.clear()


def test_a_reload_for_each_chunk_of_a_sync(moe, monkeypatch):
    """SkyRL#1680: each chunk has a reload of its own, which ends layers that the chunk has only a part of."""
    runner, load = _worker(moe).model_runner, upstream._update_weights

    def by_chunk(self, weights, **arguments):
        for start in range(0, len(weights), 5):
            reload.initialize_layerwise_reload(runner.model)
            load(self, weights[start : start + 5], **arguments)
            reload.finalize_layerwise_reload(runner.model, runner.model_config)

    move(moe.model, LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(upstream, "_update_weights", by_chunk)
        (report,) = moe.sync()
    assert report.unverified_layers > 20, "the bits cannot tell, and say so"
    assert "replica 0: its served log-probs differ" in moe.canary().problems[0]
    moe.sync()
    assert moe.canary().problems == ()


@needs_adapters
def test_an_adapter_that_binds_no_module(adapted, monkeypatch):
    """verl-omni#552: vLLM takes the adapter, and none of its layers uses it; rewards stay flat while KL explodes."""
    monkeypatch.setattr(_worker(adapted).model_runner.model.lora_manager, "modules", {})
    move(adapted.model, 0.3)
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.down_proj\.lora_A\.weight: no layer of vLLM .* of 0 "):
        adapted.sync()
    assert adapted.canary().problems[0].startswith("replica 0: ")
    monkeypatch.undo()
    adapted.sync()
    assert adapted.canary().problems == ()


@needs_adapters
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_an_adapter_with_the_tensors_of_two_layers_exchanged(adapted, monkeypatch, part):
    """All that was sent arrived, and is somewhere in vLLM's buffers."""
    load, layers = upstream._update_weights, ("layers.0.self_attn.q_proj.", "layers.2.self_attn.q_proj.")

    def exchanged(self, weights, **arguments):
        one, two = ([name for name, _ in weights if f"{layer}{part}" in name] for layer in layers)
        names = dict(zip([*one, *two], [*two, *one], strict=True))
        load(self, [(names.get(name, name), tensor) for name, tensor in weights], **arguments)

    monkeypatch.setattr(upstream, "_update_weights", exchanged)
    move(adapted.model, 0.3)
    with pytest.raises(WeightSyncError, match=rf"layers\.0\.self_attn\.q_proj\.{part}.*layers\.2\.self_attn\.q_proj"):
        adapted.sync()
    monkeypatch.undo()
    adapted.sync()


@pytest.mark.parametrize("update", [SMALL, LARGE])
def test_a_wake_up_that_loads_the_checkpoint_again(lone, monkeypatch, update):
    """trl#5312: after each sync the rollout's weights are read from the disk once more: the initial policy samples."""
    checkpoint = cached_tiny_model("qwen3")
    monkeypatch.setattr(lone, "model", AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    monkeypatch.setattr(_worker(lone).model_runner.load_config, "load_format", "auto")
    reload_from_disk = partial(lone.engines[0].collective_rpc, "reload_weights")
    _named_within_two_syncs(
        lone, reload_from_disk, update, words="did not change at all" if update == SMALL else "differ"
    )


@pytest.mark.parametrize("update", [SMALL, LARGE])
def test_a_loader_that_gives_its_first_weights_for_ever(lone, monkeypatch, update):
    """vllm#32718: weights are loaded from an iterator that was cached. All that was sent arrived, and is not loaded."""
    model, cached = type(_worker(lone).model_runner.model), {}
    load = model.load_weights

    def from_the_cache(self, weights):
        return load(self, [(name, cached.setdefault(name, tensor)) for name, tensor in weights])

    with monkeypatch.context() as patch:
        patch.setattr(model, "load_weights", from_the_cache)
        lone.sync()
        assert lone.canary().problems == ()
        _named_within_two_syncs(lone, lambda: None, update, words="did not change at all")


def test_one_replica_of_four_is_stale(four):
    """A sync that leaves a replica out; the update is smaller than the canary's bound."""
    four.sync()
    assert four.canary().problems == ()
    move(four.model, SMALL)
    four.sync(only=[0, 1, 3])
    *others, problem = four.canary().problems
    assert all(other.startswith("replica 2: its served log-probs differ") for other in others)
    assert problem.startswith("replica 2: its log-probs did not change at all")


def _applied_twice(model) -> Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]:
    before = {name: tensor.clone() for name, tensor in full_weights(model)}
    return lambda stream: ((name, 2 * t - before[name] if name in before else t) for name, t in stream)


def _experts_reversed(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Give the last expert's tensors the first one's names, and so on."""
    for name, tensor in stream:
        before, there, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        yield (f"{before}.experts.{7 - int(number)}.{leaf}" if there else name), tensor


@pytest.mark.parametrize(("name", "tensor"), [
    ("lone", r"model\.embed_tokens\.weight: float32\[99, 64\]"),
    ("moe", r"experts\.0\.\w+\.weight: float32\[\d+, \d+\]"),
])  # fmt: skip
def test_a_delta_applied_twice_and_experts_in_another_order(name, tensor, request, monkeypatch):
    """On the road to vLLM the bits name it; made before the manifest, or without one, the canary does."""
    pair = request.getfixturevalue(name)
    damage = _experts_reversed if name == "moe" else _applied_twice(pair.model)
    pair.sync()
    assert pair.canary().problems == ()
    move(pair.model, LARGE)
    with pytest.raises(WeightSyncError, match=f"{tensor} arrived with other values"):
        pair.sync(damage=damage)
    with monkeypatch.context() as patch:
        patch.setattr(pair, "_streams", lambda rank: [(damage(full_weights(pair.model)), {})])
        pair.sync()
    assert pair.canary().problems[0].startswith("replica 0: its served log-probs differ")


def _exchange_two_experts(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "layers.1." in name and name.endswith(("w13_weight", "w2_weight")):
            parameter.data[[0, 1]] = parameter.data[[1, 0]].clone()


@pytest.mark.parametrize(("name", "replica", "change"), [
    ("four", 1, lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(1.1)),
    ("moe", 0, _exchange_two_experts),  # a gap that is small beside what another model has, and large beside its own
])  # fmt: skip
def test_weights_changed_after_the_guard_looked(name, replica, change, request):
    """Memory overwritten, a graph over old memory, a kernel that nobody repacked: bits have nothing to say of it."""
    pair, words = request.getfixturevalue(name), f"replica {replica}: its served log-probs differ"
    assert all(report.unverified_layers == 0 for report in pair.sync()) and pair.canary().problems == ()
    pair.engines[replica].apply_model(change)
    problems = pair.canary().problems
    assert problems and all(problem.startswith(words) for problem in problems)
    pair.sync()
    assert pair.canary().problems == ()


@needs_adapters
def test_an_adapter_that_vllm_does_not_hold(adapted, monkeypatch):
    """During a sync the bits name it, after one the canary does."""
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.add_lora", lambda self, request: None)
    move(adapted.model, 0.3)
    with pytest.raises(WeightSyncError, match="LoRA adapter 123: vLLM does not hold it"):
        adapted.sync()
    monkeypatch.undo()
    adapted.sync()
    adapted.engines[0].llm_engine.remove_lora(123)
    assert adapted.canary().problems[0].startswith("replica 0: ")
    adapted.sync()
