"""The same command resumes; a changed one starts anew, or is refused with what differs and what can be done."""

import functools
import logging

import pytest
import yaml
from composer import compose_recipe
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.check.preflight import PreflightCallback
from verl_precision.integration.trainer import run_identity

SANITY = "recipes/sanity/sanity.yaml"
DATA = "recipes/data/stand_in.jsonl"


def named(*overrides):
    config = compose_recipe(SANITY, *overrides, return_hydra_config=True)
    PreflightCallback().on_run_start(config)
    return config


@functools.cache
def folder_of(*overrides):
    return named(*overrides).trainer.default_local_dir


@pytest.mark.parametrize("override", [
    "actor_rollout_ref.actor.optim.lr=2e-6",
    "actor_rollout_ref.actor.clip_ratio_high=0.3",
    "actor_rollout_ref.actor.fsdp_config.shadow.ratio_source=shadow",
    "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B",
    "actor_rollout_ref.rollout.agent.default_agent_loop=vp_single_turn",
    "actor_rollout_ref.rollout.n=4",
    f"data.train_files={DATA}",
    "data.max_response_length=6000",
    "data.seed=1",
    "estimator=grpo",
    "precision=bf16",
    "scale=8x8_h100",
    "trainer.v1.trainer_mode=colocate_async",
])  # fmt: skip
def test_what_changes_the_training_is_another_folder(override):
    assert folder_of(override) != folder_of()


def test_what_does_not_is_the_same_folder():
    actor = "ppo_max_token_len_per_gpu=9000 ppo_micro_batch_size_per_gpu=2 checkpoint.save_contents=[model]"
    engine = "optimizer_offload=True shadow.every_n_steps=10"
    rollout = "agent.num_workers=2 log_prob_micro_batch_size_per_gpu=2 gpu_memory_utilization=0.5 val_kwargs.n=4"
    assert folder_of() == folder_of(
        *(f"actor_rollout_ref.actor.{setting}" for setting in actor.split()),
        *(f"actor_rollout_ref.actor.fsdp_config.{setting}" for setting in engine.split()),
        *(f"actor_rollout_ref.rollout.{setting}" for setting in rollout.split()),
        *("critic.ppo_micro_batch_size_per_gpu=2", "data.dataloader_num_workers=1", f"data.val_files={DATA}"),
        *("mismatch.alarm.on_alarm=stop", "mismatch.enabled=False", "weight_sync.canary.tokens=8"),
        *("trainer.logger=[console,file,wandb]", "trainer.resume_mode=disable", "trainer.save_freq=7"),
        "trainer.total_training_steps=3000",
    )


def test_the_name_says_precision_estimator_and_digest_and_goes_into_all_files():
    config = named("precision=bf16")
    assert OmegaConf.to_container(config.trainer, resolve=False)["experiment_name"] == config.trainer.experiment_name
    assert config.trainer.experiment_name.startswith("bf16_pg_seq_is-")
    assert len(config.trainer.experiment_name) == len("bf16_pg_seq_is-") + 8
    assert config.trainer.default_local_dir == f"checkpoints/sanity/{config.trainer.experiment_name}"


def test_a_name_of_the_users_own_is_left_alone():
    assert named("trainer.experiment_name=mine").trainer.experiment_name == "mine"


@pytest.fixture
def claim(tmp_path):
    def start(*overrides, name="mine"):
        run_identity.claim_folder(named(f"trainer.default_local_dir={tmp_path / name}", *overrides))
        return tmp_path / name / run_identity.RUN_FILE

    return start


def test_the_same_command_and_one_that_only_shows_more_go_on(claim):
    before = claim().read_text()
    claim()
    assert claim("trainer.test_freq=1", "trainer.total_training_steps=3000").read_text() == before


def test_a_changed_command_in_the_same_folder_is_refused_with_both_ways_out(claim):
    before = claim().read_text()
    with pytest.raises(ConfigurationError) as refused:
        claim("actor_rollout_ref.actor.optim.lr=2e-6")
    ways_out = ("mine", "trainer.experiment_name=", "trainer.resume_mode=resume_path trainer.resume_from_path=")
    for words in ("actor_rollout_ref.actor.optim.lr was 1e-06, is 2e-06", *ways_out):
        assert words in str(refused.value)
    assert claim().read_text() == before


def test_many_differences_are_counted(claim):
    claim()
    with pytest.raises(ConfigurationError, match=r"and \d+ more"):
        claim("estimator=grpo", "precision=bf16")


def test_a_record_that_cannot_be_read_is_refused_by_name(claim):
    claim().write_text("settings: [")
    with pytest.raises(ConfigurationError, match=r"run\.yaml cannot be read"):
        claim()


def test_a_run_that_saves_nothing_leaves_nothing(claim):
    assert not claim("trainer.save_freq=-1").exists()


def test_a_new_run_says_what_it_differs_in_from_the_one_beside_it(claim, caplog):
    claim("estimator=grpo", name="far")
    claim("actor_rollout_ref.actor.optim.lr=3e-6", name="near")
    with caplog.at_level(logging.INFO, logger="verl_precision"):
        claim(name="new")
    line = caplog.records[-1].getMessage()
    assert "a new run" in line and "near" in line and "lr was 3e-06, is 1e-06" in line and "/far" not in line


def test_the_record_is_plain_yaml(claim):
    record = yaml.safe_load(claim().read_text())
    assert record["settings"]["actor_rollout_ref.rollout.n"] == 8
    assert record["digest"] == run_identity.digest(record["settings"])
