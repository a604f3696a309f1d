"""The same command resumes; a changed one starts anew, or is refused with what differs and what can be done."""

import functools

import pytest
import yaml
from composer import compose_recipe
from omegaconf import OmegaConf
from rubbish import FOREIGN, cut, flipped

from verl_precision.base import owner
from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.check.preflight import PreflightCallback
from verl_precision.integration.trainer import run_identity
from verl_precision.integration.trainer.run_identity import RunSettings, changed_settings

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
    rollout += " enable_prefix_caching=False layered_summon=True skip_tokenizer_init=False"
    assert folder_of() == folder_of(
        *(f"actor_rollout_ref.actor.{setting}" for setting in actor.split()),
        *(f"actor_rollout_ref.actor.fsdp_config.{setting}" for setting in engine.split()),
        *(f"actor_rollout_ref.rollout.{setting}" for setting in rollout.split()),
        *("actor_rollout_ref.nccl_timeout=1200", "actor_rollout_ref.model.use_shm=True"),
        *("critic.ppo_micro_batch_size_per_gpu=2", "data.dataloader_num_workers=1", f"data.val_files={DATA}"),
        *("mismatch.alarm.on_alarm=stop", "mismatch.enabled=False", "weight_sync.canary.tokens=8"),
        *("trainer.logger=[console,file,wandb]", "trainer.resume_mode=disable", "trainer.save_freq=7"),
        "trainer.total_training_steps=3000",
    )


def test_the_name_says_precision_estimator_and_digest_and_goes_into_all_files():
    assert named("trainer.experiment_name=mine").trainer.experiment_name == "mine", "a name of the user's own stays"
    config = named("precision=bf16")
    assert OmegaConf.to_container(config.trainer, resolve=False)["experiment_name"] == config.trainer.experiment_name
    assert config.trainer.experiment_name.startswith("bf16_pg_seq_is-")
    assert len(config.trainer.experiment_name) == len("bf16_pg_seq_is-") + 8
    assert config.trainer.default_local_dir == f"checkpoints/sanity/{config.trainer.experiment_name}"


@pytest.fixture
def claim(tmp_path, monkeypatch):
    for variable in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", owner.JOB_ID):
        monkeypatch.delenv(variable, raising=False)

    def start(*overrides, name="mine"):
        run_identity.claim_folder(named(f"trainer.default_local_dir={tmp_path / name}", *overrides))
        return tmp_path / name / run_identity.RUN_FILE

    yield start
    for folder in tmp_path.iterdir():
        owner.release(folder)


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
    with pytest.raises(ConfigurationError, match=r"and \d+ more"):
        claim("estimator=grpo", "precision=bf16")
    assert claim().read_text() == before


SETTINGS = {"data.seed": 1, "lr": 1e-6, "off": None, "path": "m"}
RUN = RunSettings(settings=SETTINGS, chosen=["lr", "path"], content={"path": "ab"}, digest="0" * 8)
CHANGES = (
    *({"version": 2}, {"chosen": None}, {"chosen": ["x"]}, {"content": {"path": 1}}, {"content": {"x": "y"}}),
    *({"digest": "x"}, {"digest": 12345678}, {"settings": {1: 2}}),
)
RUBBISH = *FOREIGN.values(), b"settings: [", *(yaml.safe_dump(RUN.as_record() | change).encode() for change in CHANGES)


@pytest.mark.parametrize("content", RUBBISH, ids=lambda content: repr(content[:24]))
def test_rubbish_is_nobodys_record(tmp_path, content):
    """A run that claims such a folder: tests/check/test_preflight.py."""
    (tmp_path / run_identity.RUN_FILE).write_bytes(content)
    with pytest.raises(CheckpointStateError, match=r"run\.yaml cannot be read.*trainer\.default_local_dir"):
        run_identity.run_in(tmp_path)


def test_a_record_cut_short_or_with_another_bit_is_refused_or_keeps_what_was_chosen(tmp_path):
    path = tmp_path / run_identity.RUN_FILE
    content = yaml.safe_dump(RUN.as_record(), sort_keys=False).encode()
    path.write_bytes(content)
    assert run_identity.run_in(tmp_path) == RUN
    for damaged in (*cut(content), *flipped(content, bits=2)):
        path.write_bytes(damaged)
        try:
            found = run_identity.run_in(tmp_path)
        except CheckpointStateError:
            continue
        if not changed_settings(found, RUN):  # a path with the same content is the same
            assert found.chosen == RUN.chosen and found.settings["lr"] == 1e-6, damaged


NOTHING = "trainer.save_freq=-1", "checkpoint.every_minutes=0"


def test_a_run_that_saves_nothing_leaves_nothing_and_one_that_saves_by_time_alone_does(claim, tmp_path):
    assert claim("trainer.save_freq=-1", "checkpoint.every_minutes=60", name="by_time").exists()
    assert not claim(*NOTHING, "trainer.logger=[console]").parent.exists()
    (tmp_path / "mine" / "global_step_3").mkdir(parents=True)
    assert claim(*NOTHING).exists(), "verl would go on from it"


def test_a_run_that_saves_nothing_is_alone_with_its_metrics(claim, other_run, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "mine.jsonl"))
    with pytest.raises(ConfigurationError) as refused:
        claim(*NOTHING, "trainer.logger=[console,file]", name="elsewhere")
    assert "trainer.experiment_name=" in str(refused.value) and f"process {other_run.pid} on " in str(refused.value)
    assert not (tmp_path / "elsewhere").exists()


def test_a_job_that_is_queued_again_begins_nothing_new(claim, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    claim(name="first")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(ConfigurationError) as refused:
        claim("actor_rollout_ref.actor.optim.lr=2e-6", name="second")
    for words in ("a later start of the job 7", "step 0", f"{tmp_path}/first", "lr was 1e-06, is 2e-06", "submit"):
        assert words in str(refused.value)
    assert not (tmp_path / "second").exists()
    claim(name="first")
    for variable in ("SLURM_JOB_ID", owner.JOB_ID):  # another job's first start ended before it had a folder
        monkeypatch.setenv(variable, variable)
        assert claim(f"data.seed={len(variable)}", name=variable).exists()


@pytest.fixture
def other_run(tmp_path, start_owner):
    """Another process at work in the folder `mine`, as the job 7."""
    return start_owner(tmp_path / "mine", "7")[0]


def test_the_second_of_two_starts_is_refused_and_touches_nothing(claim, other_run, monkeypatch, tmp_path):
    def there():
        return {path: path.read_bytes() for path in (tmp_path / "mine").iterdir()}

    before = there()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # a requeue beside another job does not wait for it
    with pytest.raises(ConfigurationError) as refused:
        claim()
    for words in ("trainer.default_local_dir=", f"process {other_run.pid} on ", "(job 7), since ", "were not changed"):
        assert words in str(refused.value)
    assert there() == before
    other_run.kill()
    other_run.wait()
    assert claim().exists()


def test_a_start_waits_for_the_lock_that_the_lost_host_of_its_own_job_has_left(claim, other_run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: (other_run.kill(), other_run.wait()))
    assert claim().exists()
