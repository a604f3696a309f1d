"""Tests that run in every rank at once: real FSDP1 and FSDP2 over gloo, real verl engines, a tiny Qwen3.

`test_ranks.py` starts pytest on this file in each rank; by its name pytest does not find it otherwise. All ranks run
the same tests in the same order, and stop at the first that fails.
"""

import functools
import json
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
import verl  # noqa: F401 - loads the plugin
import verl_engines
from digests import digest
from safetensors import safe_open
from torch.distributed.fsdp import _init_utils
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.integrations import flash_attention
from transformers.masking_utils import flash_attention_mask
from verl.models.transformers import monkey_patch
from verl.utils import fsdp_utils
from verl.utils import model as verl_model
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.engine.fsdp import transformer_impl

from verl_precision.base.errors import LossScaleError, PrecisionContradictionError
from verl_precision.engine.loss_scaling import local_part
from verl_precision.engine.router_replay import ReplayedRouters
from verl_precision.engine.settings import LossScaleSettings, ShadowSettings
from verl_precision.engine.shadow import ROUNDED_TO, reshard
from verl_precision.integration.engine.build import PartsOfEngine
from verl_precision.integration.engine.fsdp_engine import precision_variant
from verl_precision.integration.trainer.merged_metrics import metrics_of_loss
from verl_precision.losses.metrics import weight_statistics
from verl_precision.tools.engines.fsdp_scorer import engine_batch, nested
from verl_precision.tools.export.session import export_checkpoint
from verl_precision.tools.tiny_model import cached_tiny_model

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHARED = Path(os.environ["SHARED_FOLDER"])
FSDP1_ON_CPU = {
    "language_model": precision_variant(transformer_impl.FSDPEngineWithLMHead, "FSDP1OnCPU"),
    "value_model": precision_variant(transformer_impl.FSDPEngineWithValueHead, "FSDP1CriticOnCPU"),
}
STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
# The number of ranks decides nothing here: FSDP1 runs in one process, which `make test-matrix` starts.
ON_ONE_RANK_BOTH = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"] if WORLD == 1 else ["fsdp2"])


class TheCPU(str):
    """The device as `Tensor.to` takes it, which becomes its index in verl's f"{name}:{index}"."""

    def __format__(self, spec):
        return "0"


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """And what only a CPU needs: FSDP1 may share its weights at the start, and torch can parse verl's name for it."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", init_method=f"file://{SHARED / 'rendezvous'}", rank=RANK, world_size=WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_init_utils, "_check_module_states_for_sync_module_states", lambda states: None)
        patch.setattr(fsdp_utils, "get_device_id", lambda: TheCPU("cpu"))
        yield
    dist.destroy_process_group()


def make_engine(dtype="fp16", model_type="language_model", strategy="fsdp2", cls=None, ulysses=1, **settings):
    """Build an engine, of FSDP1 as well, which ours refuses on a CPU."""
    cls = FSDP1_ON_CPU[model_type] if strategy == "fsdp" else cls
    settings["ulysses_sequence_parallel_size"] = ulysses
    return verl_engines.make_engine(dtype, model_type=model_type, strategy=strategy, cls=cls, **settings)


def fp16_engine(strategy="fsdp2", **settings):
    return make_engine("fp16", strategy=strategy, loss_scale=LossScaleSettings(**{"initial": 1024.0, **settings}))


def batch(last=True, packed=False, lengths=(5, 8), seed=RANK):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 90, (n,), generator=generator) for n in lengths]
    sizes = {"use_dynamic_bsz": packed, "max_token_len_per_gpu": 20, "micro_batch_size_per_gpu": 1}
    data = engine_batch(ids, **sizes, use_remove_padding=packed, calculate_entropy=True, update_lr_scheduler=last)
    data["temperature"] = torch.tensor([0.7, 1.3]).repeat(len(lengths) // 2)
    return data


def mean_log_prob(model_output, data, dp_group):
    if "values" in model_output:  # a critic
        return model_output["values"].values().float().square().mean(), {}
    log_probs = model_output["log_probs"].values()
    return -log_probs.float().mean(), {"seen/log_probs_dtype": [str(log_probs.dtype)]}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient(engine, loss=mean_log_prob, **asked):
    """Return the unscaled gradient of all parameters, in float64; under FSDP1 this rank's part of it."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch(**asked), loss)
        if engine.scaler is not None:
            engine.scaler.unscale_(engine.optimizer)
        found = torch.cat([full(p.grad).flatten().double() for p in engine.module.parameters()])
    if engine.scaler is not None:
        engine.scaler.update()
    return found


def full_weights(engine):
    state = engine.module.state_dict()
    return {key.replace("_fsdp_wrapped_module.", ""): full(value) for key, value in state.items()}


def draw_adapter(engine):
    """Fill LoRA's B, which starts with zeros."""
    torch.manual_seed(1)
    with fsdp_utils.FSDP.summon_full_params(engine.module), torch.no_grad():  # FSDP2 leaves alone what it sharded
        for key, parameter in engine.module.named_parameters():
            if "lora_B" in key:
                local_part(parameter).normal_(std=0.01)


def sent(send):
    """Return the weights that an engine sends, by name, without the notes that go with them."""
    return {name: weight.clone() for name, weight in send()[0] if not name.startswith("__")}


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


def log_probs(engine, data=None, **asked):
    with engine.eval_mode():
        data = batch(**asked) if data is None else data
        return engine.infer_batch(data)["model_output"]["log_probs"].values()


def local_parameters(engine):
    return torch.cat([local_part(p).flatten() for p in engine.module.parameters()]).detach().clone()


def poisoned_step(engine, value=math.inf, rank=0, last=True):
    """Train as `step` does; after the backward, the gradient of one rank's first parameter holds `value`."""
    verls = type(engine).forward_backward_batch

    def with_value(*args, **kwargs):
        outputs = verls(engine, *args, **kwargs)
        if rank == RANK:
            local_part(next(engine.module.parameters()).grad).view(-1)[0] = value
        return outputs

    engine.forward_backward_batch = with_value
    found = step(engine, last)
    del engine.forward_backward_batch
    return found


def step(engine, last=True):
    """Train on one mini-batch, the last of a training step or not."""
    before = local_parameters(engine)
    with engine.train_mode():
        metrics = engine.train_batch(batch(last), mean_log_prob)["metrics"]
    return SimpleNamespace(
        changed=not torch.equal(before, local_parameters(engine)),
        finite=bool(torch.isfinite(local_parameters(engine)).all()),
        scale=engine.scaler.get_scale() if engine.scaler else None,
        lr=engine.lr_scheduler_step() if last else None,
        metrics={k: v for k, v in metrics.items() if k.startswith(("precision/", "grad_norm", "seen/"))},
    )


@STRATEGIES
def test_parameters_are_fp32_the_model_computes_in_fp16_and_gradients_are_those_of_fp32(strategy):
    """FP16 has unit roundoff 2^-11 = 4.9e-4; over four layers and two passes the norm may err by a few times that."""
    engine = fp16_engine(strategy, initial=64.0)
    assert type(engine).__name__ == ("FSDPEngineWithLMHeadOnCPU" if strategy == "fsdp2" else "FSDP1OnCPU")
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}, "master weights"
    assert {b.dtype for name, b in engine.module.named_buffers() if "inv_freq" in name} == {torch.float32}, "RoPE's"
    seen, up = set(), engine.module.model.layers[0].mlp.up_proj
    up.register_forward_hook(lambda up, args, output: seen.update((args[0].dtype, up.weight.dtype, output.dtype)))
    reference = gradient(make_engine("fp32", strategy=strategy))
    error = relative_error(gradient(engine), reference)
    assert seen == {torch.float16}
    assert error < 8 * 2**-11
    coarse = gradient(make_engine("bf16", plain=True, strategy=strategy))
    assert relative_error(coarse, reference) > 4 * error, "BF16 is 8 times coarser"


@STRATEGIES
def test_inf_on_one_rank_skips_the_step_on_all_and_the_scale_halves_then_grows(strategy):
    """One good step, one with inf on rank 0, two good ones; the scale grows after two. The schedule waits."""
    engine = fp16_engine(strategy, growth_interval=2)
    steps = [step(engine), poisoned_step(engine), step(engine), step(engine)]
    assert [s.changed for s in steps] == [True, False, True, True]
    assert all(s.finite for s in steps)
    assert [s.scale for s in steps] == [1024, 512, 512, 1024]
    metrics = [s.metrics for s in steps]
    assert [m["precision/loss_scale"] for m in metrics] == [[1024], [512], [512], [1024]]
    for key in ("precision/skipped_steps", "precision/overflow_rank_count"):
        assert [m[key] for m in metrics] == [[0], [1], [0], [0]]
    assert all(0 <= m["precision/grad_underflow_fraction"][0] < 0.01 for m in metrics)
    assert metrics[0]["seen/log_probs_dtype"] == ["torch.float32"] * 2
    assert steps[1].lr == steps[0].lr and steps[3].lr < steps[2].lr < steps[1].lr
    assert "grad_norm" not in metrics[1], "an inf would become the mean over mini-batches"
    assert all(math.isfinite(metrics[i]["grad_norm"]) for i in (0, 2, 3))


def test_several_updates_in_one_step_are_reported_once_and_advance_the_schedule_once():
    engine = fp16_engine()
    first, second = step(engine, last=False), poisoned_step(engine, math.nan, rank=WORLD - 1, last=False)
    assert not any(key.startswith("precision/") for key in first.metrics | second.metrics)
    metrics = step(engine).metrics
    assert metrics["precision/skipped_steps"] == metrics["precision/overflow_rank_count"] == [1]
    assert engine.lr_scheduler.last_epoch == 1


def test_the_rate_is_scaled_by_the_effective_sample_of_all_ranks_and_the_schedule_is_not():
    """Each rank's two responses have the weight 1 on rank 0, 3 on rank 1: alone, no rank has anything to scale."""
    weights = [1.0 + 2 * rank for rank in range(WORLD)]

    def weighted(model_output, data, dp_group):
        found = weight_statistics(torch.tensor([weights[RANK]]), torch.ones(1, dtype=torch.bool))
        return mean_log_prob(model_output, data, dp_group)[0], metrics_of_loss(found)

    engine = make_engine(loss_scale=LossScaleSettings(initial=1024.0), learning_rate_ess_base=1.0)
    with engine.train_mode():
        metrics = engine.train_batch(batch(), weighted)["metrics"]
    share = sum(weights) ** 2 / (WORLD * sum(weight**2 for weight in weights))
    assert metrics["precision/learning_rate_factor"] == [pytest.approx(math.sqrt(share))] and (share < 1 or WORLD == 1)
    assert engine.lr_scheduler_step() == step(fp16_engine()).lr


@pytest.mark.parametrize(
    ("strategy", "offloaded"), [("fsdp2", "param_offload"), ("fsdp2", "offload_policy"), ("fsdp", "param_offload")]
)
def test_offloading_changes_nothing_and_misses_no_overflow(strategy, offloaded):
    """The inf is on the last rank only, in the gradient where offloading keeps it."""
    loss_scale = LossScaleSettings(initial=1024.0)
    settings = {"optimizer_offload": True, "shadow": ShadowSettings(dtype="bf16", every_n_steps=1)}
    found = []
    for asked in ({}, {offloaded: True, **settings}):
        engine = make_engine("fp16", strategy=strategy, loss_scale=loss_scale, **asked)
        found.append([log_probs(engine), step(engine), poisoned_step(engine, rank=WORLD - 1), step(engine)])
        found[-1] += [log_probs(engine), local_parameters(engine)]
    for kept, offloaded_too in zip(*found, strict=True):
        assert torch.equal(kept, offloaded_too) if isinstance(kept, torch.Tensor) else kept == offloaded_too
    assert [s.changed for s in found[1][1:4]] == [True, False, True] and found[1][2].scale == 512
    assert found[1][2].metrics["precision/overflow_rank_count"] == [1]


@pytest.mark.parametrize("packed", [False, True])
def test_a_reference_gives_the_log_probs_of_an_actor_with_its_weights(packed):
    """verl's FSDP2 offloads every reference to pinned memory, which needs an accelerator."""
    reference = make_engine("fp16", packed=packed, forward_only=True, model_dtype="fp32")
    actor = make_engine("fp16", packed=packed)
    assert reference.scaler is None and reference.optimizer is None
    assert torch.equal(log_probs(reference, packed=packed), log_probs(actor, packed=packed))
    assert {p.device.type for p in reference.module.parameters()} == {"cpu"}


@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 2**-24), ("fp16", 2**-11)])
def test_packed_sequences_dynamic_batches_and_checkpointing_give_what_the_padded_run_gives(dtype, rounding):
    """With sdpa, which has no kernel for packed sequences: verl's mask keeps them apart."""
    lengths = (5, 8, 7, 11)
    padded = make_engine("fp32")
    packed = make_engine(dtype, packed=True, loss_scale=LossScaleSettings(initial=64.0))
    assert (predicted(packed, lengths, packed=True) - predicted(padded, lengths)).abs().mean() < 4 * rounding
    reference = gradient(padded, summed, lengths=lengths)
    assert relative_error(gradient(packed, summed, packed=True, lengths=lengths), reference) < 8 * rounding


def summed(model_output, data, dp_group):
    """Return minus the sum of the log-probs of all tokens that something predicts."""
    return -sum(row[:-1].sum() for row in model_output["log_probs"].unbind()), {}


def predicted(engine, lengths, **asked):
    """Return the log-probs of all tokens but the last of each sequence, which predicts nothing."""
    inner = torch.ones(sum(lengths), dtype=bool)
    inner[torch.tensor(lengths).cumsum(0) - 1] = False
    return log_probs(engine, lengths=lengths, **asked)[inner]


@pytest.fixture
def packed_attention(monkeypatch):
    """Name of an attention that runs flash attention's path in transformers and verl, with sdpa as its kernel."""

    def kernel(query, key, value, attention_mask, query_length, *args, position_ids, softmax_scale=None, **kwargs):
        starts = (position_ids[0] == 0).nonzero().flatten()
        sizes = starts.diff(append=torch.tensor([query.shape[1]])).tolist()
        repeats = query.shape[2] // key.shape[2]
        parts = [
            [part.transpose(1, 2) for part in heads.split(sizes, dim=1)]
            for heads in (query, key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2))
        ]
        attend = functools.partial(scaled_dot_product_attention, is_causal=True, scale=softmax_scale)
        return torch.cat([attend(*sequence).transpose(1, 2) for sequence in zip(*parts, strict=True)], dim=1)

    monkeypatch.setattr(monkey_patch, "_flash_attention_forward", kernel)
    transformers.AttentionInterface.register("packed_attention", flash_attention.flash_attention_forward)
    transformers.AttentionMaskInterface.register("packed_attention", flash_attention_mask)
    return "packed_attention"


@pytest.mark.skipif(WORLD == 1, reason="Ulysses splits sequences over ranks")
@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 2**-24), ("fp16", 2**-11)])
def test_ulysses_over_two_ranks_gives_what_one_rank_gives(dtype, rounding, packed_attention):
    """And with sdpa it does not, without an error of verl's: rule `ulysses-needs-flash` refuses that."""
    same = {"packed": True, "lengths": (5, 8, 7, 11), "seed": 0}  # both ranks have half of the same sequences
    build = functools.partial(make_engine, dtype, packed=True, loss_scale=LossScaleSettings(initial=64.0))
    whole, found = build(), {}
    for attention in (packed_attention, "sdpa"):
        split = build(attention=attention, ulysses=WORLD)
        assert split.get_data_parallel_size() == 1
        found[attention] = (predicted(split, **same) - predicted(whole, **same)).abs().mean()
    assert found[packed_attention] < 4 * rounding
    assert found["sdpa"] > 1e-3, "nats: each rank attends to its own half"
    split = build(attention=packed_attention, ulysses=WORLD)
    assert relative_error(gradient(split, summed, **same), gradient(whole, summed, **same)) < 8 * rounding


@STRATEGIES
@pytest.mark.skipif(WORLD == 1, reason="HSDP needs two ranks")
def test_replicas_of_hsdp_agree(strategy):
    """Each rank is a replica: inf on one must stop the other."""
    engine = make_engine("fp16", fsdp_size=1, strategy=strategy, loss_scale=LossScaleSettings(initial=1024.0))
    found = poisoned_step(engine)
    assert not found.changed and found.scale == 512


@ON_ONE_RANK_BOTH
def test_scale_at_its_minimum_stops_the_run_with_a_diagnosis(strategy):
    engine = fp16_engine(strategy, initial=2.0, minimum=1.0, stop_after_steps_at_minimum=2)
    assert [poisoned_step(engine).scale for _ in range(2)] == [1, 1], "2 -> 1, then one step at the minimum"
    with pytest.raises(LossScaleError, match=r"loss_scale.minimum=1, on 1 rank\(s\).*steps_at_minimum=2") as error:
        poisoned_step(engine)
    named = {"fsdp2": "model.embed_tokens.weight", "fsdp": "on this rank: _flat_param"}  # the root's
    assert RANK > 0 or named[strategy] in str(error.value)


@STRATEGIES
def test_resume_goes_on_exactly_and_is_refused_with_another_number_of_ranks(strategy):
    """Save after a skip and a good step, load into a fresh engine."""
    engine, folder = fp16_engine(strategy, growth_interval=4), SHARED / strategy
    poisoned_step(engine)
    step(engine)
    engine.save_checkpoint(str(folder))
    saved = engine.scaler.state_dict()
    resumed = fp16_engine(strategy, growth_interval=4)
    resumed.load_checkpoint(str(folder), del_local_after_load=False)
    assert resumed.scaler.state_dict() == saved == {"scale": 512, "growth_tracker": 1, "steps_at_minimum": 0}
    for _ in range(3):
        uninterrupted, continued = step(engine), step(resumed)
        assert continued == uninterrupted
    assert continued.scale == 1024, "the growth counter went on: 4 good steps, one before the save"
    assert torch.equal(local_parameters(engine), local_parameters(resumed))

    for name in ("model", "optim", "extra_state"):
        (folder / f"{name}_world_size_{WORLD}_rank_{RANK}.pt").rename(folder / f"{name}_world_size_7_rank_{RANK}.pt")
    with pytest.raises(FileNotFoundError, match=f"model_world_size_{WORLD}_rank_{RANK}.pt"):
        resumed.load_checkpoint(str(folder), del_local_after_load=False)


def test_upstreams_resume_starts_with_a_new_scale(caplog):
    theirs, again = make_engine("fp16", plain=True), make_engine("fp16", plain=True)
    for engine in (theirs, again):
        engine.scaler = ShardedGradScaler("cpu", growth_interval=400)  # verl's own would be disabled on a CPU
    step(theirs)
    poisoned_step(theirs)
    theirs.save_checkpoint(str(SHARED / "theirs"))
    assert theirs.scaler.get_scale() < 65536
    again.load_checkpoint(str(SHARED / "theirs"), del_local_after_load=False)
    assert again.scaler.state_dict() == {**theirs.scaler.state_dict(), "scale": 65536, "_growth_tracker": 0}

    old = fp16_engine()
    with caplog.at_level(logging.WARNING, logger="verl_precision.engine"):
        old.load_checkpoint(str(SHARED / "theirs"), del_local_after_load=False)
    assert "no loss_scale.json" in caplog.text and "starts at 1024" in caplog.text
    assert old.scaler.get_scale() == 1024


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled")
def test_without_our_config_the_engine_is_verls_bit_for_bit():
    """And traps 3.3, 3.5 and 3.6: on a CPU verl's scaler is off, log-probs have 16 bits, the schedule does not wait."""
    theirs = make_engine("fp16", plain=True, cls=transformer_impl.FSDPEngineWithLMHead)
    ours = make_engine("fp16", plain=True)
    assert type(ours.scaler) is ShardedGradScaler and not theirs.scaler.is_enabled()
    assert torch.equal(log_probs(theirs), log_probs(ours)) and log_probs(theirs).dtype == torch.float16
    rates = []
    for value in (0.0, 0.0, math.inf):
        their_step, our_step = poisoned_step(theirs, value), poisoned_step(ours, value)
        assert our_step == their_step
        assert torch.equal(local_parameters(ours).nan_to_num(), local_parameters(theirs).nan_to_num())
        rates.append(their_step.lr)
    assert their_step.metrics["grad_norm"] == math.inf
    assert rates[0] > rates[1] > rates[2]


@ON_ONE_RANK_BOTH
def test_critic_scales(strategy, monkeypatch):
    def without_flash_attention(local_path, torch_dtype, model_config, trust_remote_code):
        return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)

    monkeypatch.setattr(verl_model, "load_valuehead_model", without_flash_attention)  # which needs CUDA
    critic = make_engine(model_type="value_model", strategy=strategy, loss_scale=LossScaleSettings(initial=1024.0))
    assert type(critic).__name__ == ("FSDPEngineWithValueHeadOnCPU" if strategy == "fsdp2" else "FSDP1CriticOnCPU")
    found = step(critic)
    assert found.changed and found.metrics["precision/loss_scale"] == [1024]


def test_bf16_needs_no_scaler_and_skips_all_the_same():
    engine = make_engine("bf16")
    good, bad = step(engine), poisoned_step(engine)
    assert good.scale is None and "precision/loss_scale" not in good.metrics
    assert good.metrics["seen/log_probs_dtype"] == ["torch.float32"] * 2
    assert not bad.changed and bad.lr == good.lr
    assert [s.metrics["precision/skipped_steps"] for s in (good, bad)] == [[0], [1]]


def importance_weighted(rollout_log_probs, ratio=None):
    """Return Σ exp(log π - log μ), the objective of equation (5) token by token; or with the ratio given."""
    rows = iter(rollout_log_probs), iter(ratio or rollout_log_probs)

    def loss(model_output, data, dp_group):
        log_probs, mu, r = model_output["log_probs"].values().double(), *(next(row) for row in rows)
        return (log_probs.sub(mu).exp() if ratio is None else r * log_probs).sum(), {}

    return loss


def copy_parameters(source, target, rounded_to=torch.float32):
    reshard(target.module)
    with torch.no_grad():
        for theirs, mine in zip(source.module.parameters(), target.module.parameters(), strict=True):
            local_part(mine).copy_(local_part(theirs).to(rounded_to))


@ON_ONE_RANK_BOTH
def test_ratio_source_shadow_gives_the_shadows_value_and_the_training_gradient(strategy):
    """FP32 training with a BF16 shadow: log-probs are bit for bit a BF16 engine's, before and after an update."""
    engine = make_engine("fp32", strategy=strategy, shadow=ShadowSettings(dtype="bf16", ratio_source="shadow"))
    half, single = make_engine("bf16", strategy=strategy), make_engine("fp32", strategy=strategy)
    lengths = batch()["input_ids"].offsets().diff().tolist()
    beta = (log_probs(single) - log_probs(half)).abs().mean()
    assert beta > 1e-4, "the two precisions differ, or this test shows nothing"
    for _ in range(2):
        values = log_probs(half)
        assert torch.equal(log_probs(engine), values)
        mu = [row - 0.5 for row in values.double().split(lengths)]  # α = 0.5 on every token
        expected = gradient(single, importance_weighted(mu, [torch.full_like(row, 0.5).exp() for row in mu]))
        assert relative_error(gradient(engine, importance_weighted(mu)), expected) < 1e-6, "exp(α)·∇log π_train"
        assert relative_error(gradient(single, importance_weighted(mu)), expected) > 1e-4, "exp(α + β)·∇log π_train"
        assert step(engine).changed  # the shadow must follow
        copy_parameters(engine, half)
        copy_parameters(engine, single)


@ON_ONE_RANK_BOTH
def test_the_canary_is_scored_with_the_rollouts_weights_and_the_engine_keeps_its_own(strategy):
    engine, rounded = make_engine("fp32", strategy=strategy), make_engine("fp32", strategy=strategy)
    assert step(engine).changed
    copy_parameters(engine, rounded, rounded_to=torch.bfloat16)
    own, weights, asked = log_probs(engine), local_parameters(engine), batch()
    tu.assign_non_tensor(asked, **{ROUNDED_TO: "bfloat16"})
    found = log_probs(engine, asked)
    assert torch.equal(found, log_probs(rounded)) and not torch.equal(found, own)
    assert torch.equal(log_probs(engine), own) and torch.equal(local_parameters(engine), weights)


@ON_ONE_RANK_BOTH
def test_forward_in_another_dtype_stops_the_run(strategy):
    engine = make_engine("bf16", strategy=strategy)
    log_probs(engine)
    engine._autocast_dtype = torch.float16
    with pytest.raises(PrecisionContradictionError, match=r"actor.*model.layers.0.self_attn.q_proj: float16"):
        log_probs(engine)


@pytest.mark.parametrize(("plain", "dtype"), [(False, "float16"), (True, "bfloat16")], ids=["ours", "upstream"])
def test_export_says_the_dtype_it_was_trained_in(plain, dtype):
    """Trap 3.16: the weights are FP32, and verl's config.json tells every loader to round them to BF16."""
    folder = SHARED / f"export_{dtype}"
    make_engine("fp16", plain=plain, save=("model", "hf_model")).save_checkpoint(str(folder))
    config = json.loads((folder / "huggingface" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == dtype


LORA = dict(lora_rank=4, lora_alpha=8, target_modules="all-linear", lora={"merge": True})


@pytest.mark.parametrize(("strategy", "plain"), [("fsdp2", False), ("fsdp", False), ("fsdp2", True)])
def test_merged_lora_is_sent_as_exact_as_it_is(strategy, plain):
    """Trap 3.15: verl rounds base + scale·B·A to BF16. The reference is in float64."""
    engine = make_engine("fp16", plain=plain, lora=LORA, strategy=strategy)
    draw_adapter(engine)
    before = {key: value.double() for key, value in full_weights(engine).items()}
    merged, layer = sent(engine.get_per_tensor_param), "model.layers.0.mlp.up_proj"
    parts = ("base_layer", "lora_A.default", "lora_B.default")
    base, a, b = (before[f"base_model.model.{layer}.{part}.weight"] for part in parts)
    assert b.abs().sum() > 0
    error = (merged[f"{layer}.weight"].double() - (base + 8 / 4 * b @ a)).abs().max() / base.abs().max()
    assert {value.dtype for value in merged.values()} == {torch.bfloat16 if plain else torch.float32}
    assert error > 1e-3 if plain else error < 1e-6
    after = full_weights(engine)
    assert all(torch.equal(before[key], after[key].double()) for key in before), "the adapter is taken out again"


@ON_ONE_RANK_BOTH
def test_an_adapter_that_is_served_is_sent_whole(strategy):
    """Of a model that FSDP1 has wrapped PEFT returns no tensor of it, and verl would send none."""
    engine = make_engine("fp16", lora={**LORA, "lora": {}}, strategy=strategy)
    draw_adapter(engine)
    held = {name.replace(".default", ""): value for name, value in full_weights(engine).items() if "lora_" in name}
    found = sent(lambda: engine.get_per_tensor_param(base_sync_done=True))
    assert len(held) == 56 and found.keys() == held.keys()
    assert all(torch.equal(value, held[name]) for name, value in found.items())


@ON_ONE_RANK_BOTH
def test_weights_are_watched_on_their_way_to_the_rollout(strategy):
    """With a manifest and without one. The tiny model's weights are FP32 draws, and an update of 1e-2 crosses."""
    engine = make_engine("fp32", strategy=strategy, send_weight_manifest=strategy == "fsdp2")

    def sync_and_train():
        list(engine.get_per_tensor_param()[0])
        assert "precision/bf16_off_grid_fraction" not in step(engine, last=False).metrics
        return {key: value for key, value in step(engine).metrics.items() if "bf16" in key}

    first, second = sync_and_train(), sync_and_train()
    assert set(first) == {"precision/bf16_off_grid_fraction"}, "nothing came before"
    assert first["precision/bf16_off_grid_fraction"][0] > 0.9
    assert 0.5 < second["precision/bf16_crossings_fraction"][0] < 1


@ON_ONE_RANK_BOTH
def test_stochastic_rounding_sends_the_same_bits_from_every_rank_and_new_ones_after_a_step(strategy):
    engine = make_engine("fp32", strategy=strategy, stochastic_rounding_to="bf16")
    ours, verls = engine.get_per_tensor_param, super(PartsOfEngine, engine).get_per_tensor_param
    one, again, trained = sent(ours), sent(ours), sent(verls)
    assert {weight.dtype for weight in one.values()} == {torch.bfloat16}
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    dist.all_gather_object(everywhere := [None] * WORLD, {name: digest(weight) for name, weight in one.items()})
    assert all(digests == everywhere[0] for digests in everywhere)
    engine.lr_scheduler.step()
    unchanged = {name for name, weight in sent(ours).items() if torch.equal(weight, one[name])}
    assert unchanged == {name for name, weight in trained.items() if torch.equal(weight, one[name].float())}
    assert step(engine).metrics["precision/bf16_crossings_fraction"] == [0], "of the trained weights, not of those sent"


EXPORTED = {"fsdp2": {}, "lora": {"lora": LORA}, "tied": {"architecture": "qwen3_tied"}}
SHARDED = {"fsdp1": {"strategy": "fsdp"}, "replicas": {"fsdp_size": 1}}
EXPORTED |= SHARDED if WORLD > 1 else {"moe": {"architecture": "qwen3_moe"}}


@pytest.mark.parametrize("settings", EXPORTED.values(), ids=EXPORTED)
def test_an_export_is_the_models_weights_rounded_once(settings, request):
    """What transformers loads are the trainer's FP32 weights in FP16; values that BF16 cannot hold are among them."""
    engine, folder = make_engine("fp16", save=("model",), **settings), SHARED / request.node.name
    draw_adapter(engine)
    held = full_weights(engine)
    engine.save_checkpoint(str(folder / "global_step_1" / "actor"))
    if RANK:
        return
    export_checkpoint(folder / "global_step_1", "fp16", folder / "export")
    model = AutoModelForCausalLM.from_pretrained(folder / "export", dtype="auto")
    expected = {}
    for key, value in held.items():
        layer = key.removesuffix("base_layer.weight")
        if layer != key:
            a, b = (held[f"{layer}lora_{part}.default.weight"] for part in "AB")
            value = value + 8 / 4 * b @ a
        if "lora_" not in key:
            expected[key.removeprefix("base_model.model.").replace(".base_layer", "")] = value.half()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert {key for key in found if not torch.equal(found[key], expected[key])} == set()
    assert any((value != value.bfloat16()).any() for value in found.values())
    with safe_open(next((folder / "export").glob("*.safetensors")), "pt") as weights:
        assert ("lm_head.weight" in weights.keys()) == (settings.get("architecture") != "qwen3_tied")


@pytest.mark.parametrize("lora", [None, {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}])
def test_a_rank_computes_with_the_experts_of_its_own_sequences(lora):
    """Packed, with gradient checkpointing: log-probs and gradient are those of the unsharded model, replayed alike."""
    replay = EngineRouterReplayConfig(mode="R3")
    engine = make_engine("fp32", packed=True, architecture="qwen3_moe", lora=lora, router_replay=replay)
    plain = AutoModelForCausalLM.from_pretrained(cached_tiny_model("qwen3_moe"), dtype=torch.float32)
    config, gradients, replayed, routers = plain.config, [], {}, ReplayedRouters(plain)
    for rank in range(WORLD):
        data, choices, expected = batch(packed=True, seed=rank), [], []
        plain.zero_grad()
        labels = data["input_ids"].values().roll(-1).split(data["input_ids"].offsets().diff().tolist())
        for i, ids in enumerate(data["input_ids"].unbind()):
            scores = torch.rand(len(ids), config.num_hidden_layers, config.num_experts)
            choices.append((scores.topk(config.num_experts_per_tok).indices).to(torch.int16))
            known = torch.arange(len(ids)) < len(ids) - 1  # the last token never went through the rollout's model
            known &= (choices[-1] != 0).flatten(1).any(1)
            routers.replay(choices[-1], known)
            log_p = (plain(input_ids=ids[None]).logits[0] / data["temperature"][i]).log_softmax(-1)
            expected.append(log_p[torch.arange(len(ids)), labels[i]])
        (-torch.cat(expected).mean()).backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in plain.parameters()]))
        replayed[rank] = data, choices, torch.cat(expected).detach()
    data, choices, expected = replayed[RANK]
    data["routed_experts"] = nested(choices)
    found = log_probs(engine, data)
    plain_found = log_probs(make_engine("fp32", packed=True, architecture="qwen3_moe"), packed=True)
    assert (plain_found - expected).abs().max() > 1e-3, "these are not the experts that it would choose"
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        metrics = engine.forward_backward_batch(data, mean_log_prob)["metrics"]
        if lora is None:
            found = torch.cat([full(p.grad).flatten().double() for p in engine.module.parameters()])
            assert relative_error(found, sum(gradients) / WORLD) < 1e-4
    assert "mismatch/routing_agreement/layer_03" in metrics


@ON_ONE_RANK_BOTH
def test_a_shadow_follows_lora(strategy):
    """Its adapter is the actor's after an update: in the actor's own dtype, both give the same log-probs."""
    engine = make_engine("fp32", lora=LORA, strategy=strategy, shadow=ShadowSettings(dtype="fp32", every_n_steps=1))

    def shadows():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "forward_step", lambda data, **_: engine.shadow.step(engine.module, data))
            return log_probs(engine)

    before = shadows()
    assert torch.equal(before, log_probs(engine)) and step(engine).changed
    found = shadows()
    assert torch.equal(found, log_probs(engine)) and not torch.equal(found, before)
