"""Every estimator preset trains a real engine: verl's rollout correction, its `ppo_loss`, FSDP2 in FP16, an update."""

import functools
import math

import pytest
import torch
import verl_engines
from composer import actor_config, compose_estimator

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.engine.measurement import MISMATCH, REQUEST
from verl_precision.integration.trainer.checkpoints import is_complete
from verl_precision.presets import preset_names
from verl_precision.tools.engines.fsdp_scorer import engine_batch, nested

PROMPT, RESPONSES, RESPONSE = 4, 4, 6
SEQUENCE, SCALE = PROMPT + RESPONSE, 1024.0


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


def make_batch():
    """Return a batch of prompts with responses, packed into micro-batches of two."""
    token_ids = torch.randint(3, 90, (RESPONSES, SEQUENCE), generator=torch.Generator().manual_seed(0))
    settings = {"use_remove_padding": True, "calculate_entropy": False, "update_lr_scheduler": True}
    sizes = {"max_token_len_per_gpu": 2 * SEQUENCE, "global_batch_size": RESPONSES, "max_response_len": -1}
    batch = engine_batch(list(token_ids), **settings, **sizes)
    batch["prompts"], batch["responses"] = (nested(list(part)) for part in token_ids.split([PROMPT, RESPONSE], dim=1))
    batch["loss_mask"] = nested([(torch.arange(SEQUENCE) >= PROMPT).float()] * RESPONSES)
    return batch


def as_the_driver_makes_it(config, trainer_log_probs, gap=1e-4, shift=0.0):
    """Return the tensors that verl's driver makes for the update: old log-probs, advantages, mask, perhaps weights."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    generator = torch.Generator().manual_seed(1)
    rollout_log_probs = trainer_log_probs + shift + gap * torch.randn(trainer_log_probs.shape, generator=generator)
    mask = torch.ones_like(rollout_log_probs)
    correction = config.algorithm.rollout_correction
    found = {"response_mask": mask, "advantages": torch.tensor([1.0, -1, 0.5, -0.5])[:, None] * mask}
    if correction is not None and correction.get("bypass_mode"):
        return found | {"old_log_probs": rollout_log_probs}
    found |= {"old_log_probs": trainer_log_probs, "rollout_log_probs": rollout_log_probs}
    if correction is None:
        return found
    return dict(compute_rollout_correction_and_add_to_batch(DataProto.from_dict(found), correction)[0].batch)


def weights(engine):
    return torch.cat([parameter.full_tensor().flatten() for parameter in engine.module.parameters()]).detach()


def updated(engine, config, asked=None, **made):
    """Train on one mini-batch; return what the engine reports, and the log-ratios to the old log-probs before."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    with engine.eval_mode():
        scored = engine.infer_batch(make_batch())["model_output"]["log_probs"].unbind()
    batch, trainer_log_probs = make_batch(), torch.stack([row[PROMPT - 1 : -1].float() for row in scored])
    driver = as_the_driver_makes_it(config, trainer_log_probs, **made)
    for name, values in driver.items():
        batch[name] = nested(list(values))
    tu.assign_non_tensor(batch, **asked or {})
    with engine.train_mode():
        metrics = engine.train_batch(batch, functools.partial(ppo_loss, actor_config(config)))["metrics"]
    return metrics, trainer_log_probs - driver["old_log_probs"]


@pytest.mark.parametrize("estimator", preset_names("estimator"))
def test_an_update_reaches_the_weights(engine, estimator):
    before = weights(engine)
    metrics, _ = updated(engine, compose_estimator(estimator))
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert not torch.equal(weights(engine), before) and torch.isfinite(weights(engine)).all()
    assert metrics["precision/loss_scale"] == [SCALE] and metrics["precision/skipped_steps"] == [0]
    assert math.isfinite(metrics["actor/pg_loss"].aggregate())


@pytest.mark.usefixtures("make_engine")
def test_an_update_of_verls_own_engine_is_measured_where_the_trainer_asks():
    asked = dict.fromkeys(("mismatch", "rollout_as_shadow", "bypass", "beta_in_ratio"), True)
    request = {**asked, "clip": None, "longest_response": RESPONSE, "keep": 0, "distillation": False}
    engine, config = verl_engines.make_engine(plain=True, packed=True), compose_estimator("pg_seq_is")
    metrics, _ = updated(engine, config, {REQUEST: request})
    assert metrics[MISMATCH].aggregate().metrics()["mismatch/tokens"] == RESPONSES * RESPONSE
    assert not [key for key in updated(engine, config)[0] if "verl_precision" in key or "precision/" in key]


def test_verls_own_checkpoints_are_told_to_be_complete_and_those_of_an_earlier_start_are_removed(engine, tmp_path):
    paths = [tmp_path / f"global_step_{step}" for step in (1, 2, 3)]
    for step, path in enumerate(paths, 1):
        engine.checkpoint_manager.previous_saved_paths = []  # as after a start of its own
        engine.save_checkpoint(str(path / "actor"), None, step, 2)
        assert not is_complete(path)
        torch.save({}, path / "data.pt")  # as verl's trainer does then
    assert [is_complete(path) for path in paths] == [False, True, True] and not (paths[0] / "actor").exists()


def test_the_learning_rate_is_scaled_by_the_root_of_the_effective_sample(make_engine):
    """VCPO, and AdamW's step, decay included, is proportional to the rate. The second update's weights are all 0."""
    config, one = compose_estimator("pg_seq_is"), make_engine()
    scaled = make_engine(learning_rate_ess_base=1.0)
    before = weights(scaled)
    assert torch.equal(weights(one), before)
    metrics, log_ratios = updated(scaled, config, gap=1.0)
    plain, _ = updated(one, config, gap=1.0)
    rho = log_ratios.double().sum(dim=-1).exp()
    expected = math.sqrt(rho.sum() ** 2 / (RESPONSES * rho.square().sum()))
    (factor,) = metrics["precision/learning_rate_factor"]
    assert factor == pytest.approx(expected, rel=1e-2) and factor < 0.95
    assert "precision/learning_rate_factor" not in plain
    moved, moved_by_plain = weights(scaled) - before, weights(one) - before
    assert (moved - factor * moved_by_plain).norm() < 1e-3 * moved.norm()
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (scaled, one)]
    assert rates[0] == rates[1], "the schedule sees its own rate"
    halfway = weights(scaled)
    metrics, _ = updated(scaled, compose_estimator("grpo_seq_mis"), gap=0.0, shift=-9.0)
    assert metrics["precision/learning_rate_factor"] == [0.0] and torch.equal(weights(scaled), halfway)


def test_a_loss_without_weights_cannot_scale_the_learning_rate(make_engine):
    scaled = make_engine(learning_rate_ess_base=1.0)
    with pytest.raises(ConfigurationError, match="learning_rate_ess_base=1.0: the loss reported no importance weights"):
        updated(scaled, compose_estimator("grpo"))
