"""The measuring trainers fit verl's: same hooks, same signatures, and to verl they are its own mode."""

import inspect

import pytest
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from verl_precision.errors import ConfigurationError
from verl_precision.integration.trainers import MODES

HOOKS = (
    *("_compute_advantage", "_update_actor", "_compute_metrics", "_save_checkpoint", "_load_checkpoint"),
    *("on_init_end", "on_sample_end", "on_step_end"),
)


@pytest.mark.parametrize("mode", MODES)
def test_every_hook_is_verls_with_the_same_parameters(mode):
    ours, theirs = TRAINER_REGISTRY[f"vp_{mode}"], TRAINER_REGISTRY[mode]
    assert issubclass(ours, theirs) and ours is not theirs
    assert {name for name in vars(ours) if callable(vars(ours)[name])} == {"__init__", *HOOKS}
    for hook in HOOKS:
        mine, base = (list(inspect.signature(getattr(cls, hook)).parameters) for cls in (ours, theirs))
        assert mine == base, hook


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_verl_sees_its_own_mode(compose_verl, mode, monkeypatch):
    """Settings are chosen by the mode's name inside verl."""
    base = TRAINER_REGISTRY[mode]
    seen = {}
    monkeypatch.setattr(base, "__init__", lambda self, config: seen.update(mode=config.trainer.v1.trainer_mode))
    log_probs = "actor_rollout_ref.rollout.calculate_log_probs=True"
    config = compose_verl(f"trainer.v1.trainer_mode=vp_{mode}", log_probs, "actor_rollout_ref.rollout.name=vllm")
    TRAINER_REGISTRY[f"vp_{mode}"](config)
    assert seen == {"mode": mode}


def test_separate_async_cannot_run_on_a_cpu(compose_verl):
    """It wants a checkpoint engine other than `naive`; all of verl's need CUDA or RDMA. So the tests above stand in."""
    config = compose_verl(
        "+scale=cpu",
        "trainer.v1.trainer_mode=vp_separate_async",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.v1.separate_async.parameter_sync_step=1",
    )
    with pytest.raises(AssertionError, match="please use nccl/nixl/mooncake"):
        TRAINER_REGISTRY["vp_separate_async"](config)


def test_without_rollout_log_probs_it_is_refused(compose_verl):
    config = compose_verl("actor_rollout_ref.rollout.calculate_log_probs=False")
    with pytest.raises(ConfigurationError, match="calculate_log_probs=False"):
        TRAINER_REGISTRY["vp_sync"](config)
