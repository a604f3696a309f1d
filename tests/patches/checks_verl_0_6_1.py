"""What the series for verl 0.6.1 promises, run by test_releases.py in a process whose verl is the tree.

Every test here fails in the release and passes with the series, but for test_default_update_is_written_down, which
passes in both. Oracles are written plainly, in float64, from the equations.
"""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as correct_batch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.metric import reduce_metrics
from verl.workers.actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

ROWS, PROMPT, WIDTH, VOCABULARY = 4, 3, 5, 32


@pytest.fixture(autouse=True, scope="module")
def one_process(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("dist") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def actor_config(**settings):
    needed = {"strategy": "fsdp", "rollout_n": 1, "ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": 2}
    return FSDPActorConfig(**{**needed, "use_torch_compile": False, **settings})


def make_actor(**settings):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=2))
    return DataParallelPPOActor(actor_config(**settings), model, torch.optim.SGD(model.parameters(), lr=0.1))


def make_data(rollout_log_probs=None, advantages=None):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (ROWS, PROMPT + WIDTH), generator=generator)
    mask = torch.ones(ROWS, PROMPT + WIDTH, dtype=torch.long)
    mask[1, -2:] = 0
    positions = torch.arange(PROMPT + WIDTH).expand(ROWS, -1).clone()
    tensors = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    tensors |= {"responses": tokens[:, PROMPT:], "response_mask": mask[:, PROMPT:]}
    tensors["old_log_probs"] = torch.full((ROWS, WIDTH), -3.0)
    tensors["advantages"] = torch.ones(ROWS, WIDTH) if advantages is None else advantages
    tensors |= {} if rollout_log_probs is None else {"rollout_log_probs": rollout_log_probs}
    return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0})


def parameters(actor):
    return torch.cat([p.detach().flatten() for p in actor.actor_module.parameters()])


def compose_ppo(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


# Patch 0001
@pytest.mark.parametrize("cut", [[4], [2, 2], [1, 1, 1, 1], [3, 1]])
def test_aggregation_is_dr_grpo_however_the_mini_batch_is_cut(cut):
    """(1/N) Σ_b Σ_t loss_bt / T, from micro-batches weighed by their share of rows as the actor weighs them."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = (torch.arange(6) < torch.tensor([[6], [2], [0], [4]])).double()  # one response has no token
    oracle = sum(losses[b, t] * mask[b, t] for b in range(4) for t in range(6)) / 4 / 6
    parts = zip(losses.split(cut), mask.split(cut), strict=True)
    total = sum(agg_loss(part, valid, "seq-mean-token-sum-norm") * len(part) / 4 for part, valid in parts)
    if cut != [1, 1, 1, 1]:  # with one row each, sum and mean agree: the release is right by accident
        torch.testing.assert_close(total, oracle)
    wider = agg_loss(torch.cat([losses, losses]), torch.cat([mask, mask]), "seq-mean-token-sum-norm")
    torch.testing.assert_close(wider, oracle)  # twice the same responses: the same mean


# Patch 0002
def test_param_dtype_decides_on_autocast_and_scaling():
    half = make_actor(fsdp_config=FSDPEngineConfig(mixed_precision={"param_dtype": "fp16"}))
    full = make_actor(fsdp_config=FSDPEngineConfig(mixed_precision={"param_dtype": "fp32"}, dtype="float16"))
    seen = []
    half.actor_module.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    half.update_policy(make_data())
    assert half.scaler is not None and set(seen) == {torch.float16}
    assert full.scaler is None and full.param_dtype == torch.float32


# Patch 0003
def test_reference_and_rollout_follow_the_actor_until_told_otherwise():
    for told, rollout in (((), "float16"), (("actor_rollout_ref.rollout.dtype=bfloat16",), "bfloat16")):
        config = compose_ppo("actor_rollout_ref.actor.fsdp_config.dtype=float16", *told).actor_rollout_ref
        assert (config.ref.fsdp_config.dtype, config.rollout.dtype) == ("float16", rollout)


# Patch 0004
def half_actor(**grad_scaler):
    from verl.workers.config import GradScalerConfig

    return make_actor(fsdp_config=FSDPEngineConfig(dtype="float16", grad_scaler=GradScalerConfig(**grad_scaler)))


def test_overflow_skips_the_update_backs_off_and_leaves_the_mean_norm_finite():
    actor = half_actor(init_scale=2.0**100)
    before = parameters(actor)
    metrics = actor.update_policy(make_data())
    assert torch.equal(parameters(actor), before)
    assert metrics["actor/loss_scale"] == [2.0**99] and metrics["actor/skipped_update"] == [1.0]
    assert "actor/grad_norm" not in metrics


# Patch 0005
def manager(actor, **more):
    model = fully_shard(actor.actor_module, mesh=init_device_mesh("cpu", (1,)))
    return FSDPCheckpointManager(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more)


@pytest.mark.parametrize("used", [False, True])
def test_a_resumed_run_goes_on_with_its_scale_and_counter(tmp_path, used):
    actor = half_actor(init_scale=2.0**100)
    for _ in range(3):  # 2^100 to 2^97
        actor.update_policy(make_data())
    actor.scaler.update(new_scale=1024.0)  # a scale that does not overflow
    for _ in range(2):
        actor.update_policy(make_data())
    manager(actor, grad_scaler=actor.scaler).save_checkpoint(str(tmp_path))

    resumed = half_actor(init_scale=8.0, backoff_factor=0.25)
    if used:
        resumed.update_policy(make_data())
    manager(resumed, grad_scaler=resumed.scaler).load_checkpoint(str(tmp_path))
    assert resumed.scaler.get_scale() == actor.scaler.get_scale() == 1024.0
    assert resumed.scaler.state_dict()["_growth_tracker"] == actor.scaler.state_dict()["_growth_tracker"] > 0
    assert resumed.scaler.get_backoff_factor() == 0.25  # of the configuration


# Patch 0006
C = 3.0
# log-ratio of each response as a whole: far below, at, just within and just above C, and beyond what exp can hold
SEQUENCE_LOG_RATIOS = [-500.0, -2.0, 0.0, math.log(C) - 1e-3, math.log(C) + 1e-3, 20.0, 500.0]


def weight(estimator, log_ratio):
    """ρ (5), min(ρ, C) (6), ρ 1{ρ ≤ C} (7), of arXiv 2510.26788."""
    if estimator == "pg_seq_is":
        return math.exp(log_ratio)
    if estimator == "pg_seq_tis":
        return math.exp(min(log_ratio, math.log(C)))
    return math.exp(log_ratio) if log_ratio <= math.log(C) else 0.0


def policy_gradient(estimator, trainer, rollout, advantages, mask, threshold=C):
    config = actor_config(policy_loss=PolicyLossConfig(loss_mode=estimator, rollout_is_threshold=threshold))
    trainer = trainer.clone().requires_grad_()
    batch = {"old_log_prob": rollout, "log_prob": trainer, "advantages": advantages, "response_mask": mask}
    loss, _ = get_policy_loss_fn(estimator)(**batch, loss_agg_mode="seq-mean-token-sum-norm", config=config)
    loss.backward()
    return trainer.grad


@pytest.mark.parametrize("estimator", ["pg_seq_is", "pg_seq_tis", "pg_seq_mis"])
def test_gradient_is_the_equation(estimator):
    log_ratios = [r for r in SEQUENCE_LOG_RATIOS if estimator != "pg_seq_is" or r < 60]
    rows, width = len(log_ratios), 4
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(rows, width)
    mask[0, 3:] = 0
    trainer = -torch.rand(rows, width, generator=generator) * 5
    rollout = trainer.double() - torch.tensor(log_ratios).double().unsqueeze(-1) * mask / mask.sum(-1, keepdim=True)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).clone()
    masked = mask == 0
    trainer[masked], rollout[masked], advantages[masked] = torch.nan, torch.inf, torch.nan  # must not matter
    gradient = policy_gradient(estimator, trainer.double(), rollout, advantages.double(), mask.double())
    weights = torch.tensor([[weight(estimator, log_ratio)] for log_ratio in log_ratios], dtype=torch.float64)
    wanted = torch.where(masked, 0.0, -weights * advantages / rows / width)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0.0)


def test_the_actor_weighs_on_policy_too():
    """One mini-batch, one epoch: the release then takes log_prob.detach() for old_log_probs; every ratio is 1."""
    rollout = torch.full((ROWS, WIDTH), -4.0)  # the model is near uniform, -log 32 = -3.47: ratios of about e^(0.5 n)
    loss = PolicyLossConfig(loss_mode="pg_seq_tis", rollout_is_threshold=1e6)
    actor = make_actor(policy_loss=loss)
    metrics = reduce_metrics(actor.update_policy(make_data(rollout)))
    assert metrics["actor/is_weight_max"] > 5 and metrics["actor/truncated_fraction"] == 0
    other = make_actor(policy_loss=loss)
    other.update_policy(make_data(rollout + 0.5))
    assert not torch.equal(parameters(actor), parameters(other))  # mu matters


# Patch 0007
def test_one_sided_masking_is_the_equation_and_keeps_the_response_in_the_denominator():
    log_ratios = [r for r in SEQUENCE_LOG_RATIOS if r > -19]  # the release holds log-ratios at -20
    mask = torch.ones(len(log_ratios), 2)
    rollout = -mask - torch.tensor(log_ratios).unsqueeze(-1) * torch.tensor([[0.25, 0.75]])
    tensors = {"old_log_probs": -mask, "rollout_log_probs": rollout, "response_mask": mask.clone()}
    settings = ("rollout_is=sequence", f"rollout_is_threshold={C}", "rollout_is_mode=mask")
    config = compose_ppo(*(f"algorithm.rollout_correction.{setting}" for setting in settings))
    batch, metrics = correct_batch(DataProto.from_dict(tensors=tensors), config.algorithm.rollout_correction)
    wanted = [[weight("pg_seq_mis", log_ratio)] * 2 for log_ratio in log_ratios]
    torch.testing.assert_close(batch.batch["rollout_is_weights"], torch.tensor(wanted), rtol=1e-5, atol=1e-12)
    assert torch.equal(batch.batch["response_mask"], mask)
    assert metrics["rollout_corr/rollout_is_masked_fraction"] == pytest.approx(3 / len(log_ratios))


# Patch 0008
def test_mismatch_metrics_are_their_formulas():
    from verl.trainer.ppo.mismatch_metrics import compute_mismatch_metrics

    nan = math.nan
    trainer = torch.tensor([[-1.0, -2.0, nan], [-0.5, nan, nan], [nan, nan, nan]])
    rollout = torch.tensor([[-1.5, -1.0, nan], [-0.5, nan, nan], [nan, nan, nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    wanted = {"log_prob_gap_abs_mean": 0.5, "log_prob_gap_abs_max": 1.0, "seq_log_ratio_max": 0.0}
    wanted |= {"seq_log_ratio_min": -0.5, "k3_kl": sum(math.exp(d) - d - 1 for d in (0.5, -1.0, 0.0)) / 3}
    wanted |= {"prob_gap_max": math.exp(-1.0) - math.exp(-1.5), "prob_gap_min": math.exp(-2.0) - math.exp(-1.0)}
    metrics = compute_mismatch_metrics(trainer, rollout, mask)
    assert metrics == pytest.approx({f"mismatch/{name}": value for name, value in wanted.items()})
    assert compute_mismatch_metrics(trainer, rollout, torch.zeros(3, 3)) == {}


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_actor_measures_before_the_first_update_whatever_the_cut(epochs):
    found = []
    for micro_batch_size in (1, 2, 4):
        actor = make_actor(mismatch_metrics=True, ppo_micro_batch_size_per_gpu=micro_batch_size, ppo_epochs=epochs)
        metrics = actor.update_policy(make_data(torch.full((ROWS, WIDTH), -4.0)))
        metrics = {key: value for key, value in metrics.items() if key.startswith("mismatch/")}
        assert len(metrics) == 7 and all(len(values) == 1 for values in metrics.values())
        found.append({key: values[0] for key, values in metrics.items()})
    assert found[:2] == [pytest.approx(found[2], rel=2e-2)] * 2
    assert found[0]["mismatch/log_prob_gap_abs_mean"] == pytest.approx(0.53, abs=0.1)


# What whoever sets nothing gets, bit for bit: test_releases.py compares what the release and the patched tree write.
def test_default_update_is_written_down():
    actor = make_actor(ppo_epochs=2, entropy_coeff=0.01)
    data = make_data(torch.full((ROWS, WIDTH), -4.0), advantages=torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
    metrics = [actor.update_policy(data) for _ in range(2)]
    digest = hashlib.sha256(parameters(actor).numpy().tobytes()).hexdigest()
    Path("default_update.json").write_text(json.dumps({"parameters": digest, "metrics": metrics}))
