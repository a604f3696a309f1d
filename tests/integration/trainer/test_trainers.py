"""The measuring trainers fit verl's: same hooks, same signatures, and to verl they are its own mode."""

import inspect
import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from composer import compose_verl
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils.metric import reduce_metrics

from verl_precision.base import extensions
from verl_precision.base.errors import ConfigurationError, MismatchAlarmError
from verl_precision.base.mergeable import Mean
from verl_precision.integration.trainer.merged_metrics import MergedMetric
from verl_precision.integration.trainer.run_monitor import ALARM_FILE, STEP_METRICS
from verl_precision.integration.trainer.trainers import HOOKS, MODES, measured_mode

LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


@pytest.mark.parametrize("mode", MODES)
def test_every_hook_is_verls(mode):
    ours, theirs = TRAINER_REGISTRY[f"vp_{mode}"], TRAINER_REGISTRY[mode]
    assert issubclass(ours, theirs) and ours is not theirs
    assert {name for name in vars(ours) if callable(vars(ours)[name])} == {"__init__", *HOOKS}
    for hook in HOOKS:
        assert [*inspect.signature(getattr(ours, hook)).parameters] == ["self", "args", "kwargs"], "passed on"
        assert callable(getattr(theirs, hook))


@pytest.fixture
def config():
    return compose_verl("+precision=fp16", "actor_rollout_ref.rollout.name=vllm", f"{LOG_PROBS}=True")


@pytest.mark.parametrize("mode", MODES)
def test_it_takes_the_place_of_verls_trainer_which_sees_its_own_mode(config, mode, monkeypatch):
    """Settings are chosen by the mode's name inside verl."""
    config.trainer.v1.trainer_mode = mode
    assert measured_mode(config) == f"vp_{mode}"
    seen = {}
    base_init = lambda self, config: seen.update(mode=config.trainer.v1.trainer_mode)  # noqa: E731
    monkeypatch.setattr(TRAINER_REGISTRY[mode], "__init__", base_init)
    config.trainer.v1.trainer_mode = f"vp_{mode}"
    TRAINER_REGISTRY[f"vp_{mode}"](config)
    assert seen == {"mode": mode}


def test_switched_off_or_not_verls_it_stays_away(config):
    config.trainer.v1.trainer_mode = "mine"
    assert measured_mode(config) is None
    config.trainer.v1.trainer_mode = "sync"
    config.mismatch.enabled = False
    assert measured_mode(config) is None


def test_without_rollout_log_probs_it_is_refused(config):
    config.actor_rollout_ref.rollout.calculate_log_probs = False
    for refused in (measured_mode, TRAINER_REGISTRY["vp_sync"]):
        with pytest.raises(ConfigurationError, match="calculate_log_probs=False.*mismatch.enabled=True"):
            refused(config)


@pytest.fixture
def base(monkeypatch):
    """verl's trainer without its part of what it does."""
    base = TRAINER_REGISTRY["sync"]
    monkeypatch.setattr(base, "__init__", lambda self, config: setattr(self, "config", config))
    monkeypatch.setattr(base, "_compute_metrics", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(base, "_save_checkpoint", lambda self: None)
    return base


@pytest.fixture
def trainer(config, base, tmp_path):
    """Our trainer at step 2 of 9."""
    for step in (1, 2):
        (tmp_path / f"global_step_{step}").mkdir()
    config.trainer.default_local_dir, config.trainer.v1.trainer_mode = str(tmp_path), "vp_sync"
    trainer = TRAINER_REGISTRY["vp_sync"](config)
    trainer.global_steps, trainer.local_trigger_step, trainer.total_training_steps = 2, 0, 9
    trainer.logger, trainer.tokenizer = SimpleNamespace(log=lambda data, step: None), None
    return trainer


def test_callbacks_go_around_verls_method_in_their_order(trainer, base, monkeypatch):
    """The first is the outermost. What a callback hands on is what the next one gets, and its answer is theirs."""

    def around(name):
        return lambda proceed, manager: f"{name}({proceed(manager + name)})"

    monkeypatch.setattr(base, "fit", lambda self, manager: manager)
    trainer.callbacks = [SimpleNamespace(fit=around("a")), SimpleNamespace(), SimpleNamespace(fit=around("b"))]
    assert trainer.fit("verl ") == "a(b(verl ab))"


def test_a_callback_that_is_promised_and_not_installed_is_refused(config, monkeypatch):
    monkeypatch.setattr(extensions, "installed", lambda group: [])
    OmegaConf.update(config, "mismatch.keep_tokens", 4)
    with pytest.raises(ConfigurationError, match="mismatch.keep_tokens=4: .*not installed"):
        measured_mode(config)
    config.mismatch.keep_tokens = 0
    assert measured_mode(config) == "vp_sync"


def test_an_alarm_that_stops_the_run_saves_while_the_rollout_sleeps(trainer, monkeypatch, tmp_path):
    """verl has woken it for the next step by then, and on a GPU saving needs that memory.

    The last checkpoint before the trouble began is marked, so that verl does not remove it.
    """
    done = []
    monkeypatch.setattr(TRAINER_REGISTRY["sync"], "_save_checkpoint", lambda self: done.append("saved"))
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: done.append("asleep"))
    trainer.monitor.first_alarm_step = 2
    monkeypatch.setattr(trainer.monitor, "judge", Mock(side_effect=MismatchAlarmError("k3 grows")))
    for _ in range(2):
        with pytest.raises(MismatchAlarmError):
            trainer._compute_metrics(None, {}, {}, global_steps=2, epoch=0)
        assert done == ["asleep", "saved"], "saved twice, verl removes it where one checkpoint is kept"
    assert (tmp_path / "global_step_1" / "KEEP").is_file()


def test_the_alarm_of_a_step_is_in_the_checkpoint_of_that_step(trainer, tmp_path):
    """verl saves before the metrics of the step are there to be judged."""
    trainer._save_checkpoint()
    trainer._compute_metrics(None, {"mismatch/k3_kl": 1e-5}, {}, global_steps=2, epoch=0)
    saved = json.loads((tmp_path / "global_step_2" / ALARM_FILE).read_text())
    assert len(saved["k3_growth"]["baseline"]) == 1
    assert json.loads((tmp_path / "global_step_2" / STEP_METRICS).read_text())["mismatch/k3_kl"] == 1e-5


@pytest.mark.parametrize(("step", "saved_by_verl", "asked", "saves", "last"), [
    (2, False, [], 0, 9),
    (2, False, [".save_requested"], 1, 9),
    (2, True, [".save_requested"], 0, 9),
    (2, False, [".end_requested"], 1, 2),
    (2, True, [".end_requested"], 0, 2),
    (9, False, [".end_requested"], 0, 9),  # the last step: verl ends by itself
])  # fmt: skip
def test_at_the_end_of_a_step_it_saves_and_ends_as_asked(
    trainer, monkeypatch, tmp_path, step, saved_by_verl, asked, saves, last
):
    """Before verl's own end of the step, which wakes the rollout; verl's loop ends after the step it counts as last."""
    base, done = TRAINER_REGISTRY["sync"], []
    monkeypatch.setattr(base, "on_step_end", lambda self: done.append("verl"))
    del trainer.callbacks[-1]  # the canary
    trainer.global_steps, trainer.timing_raw = step, {}
    for request in asked:
        (tmp_path / request).touch()
    if saved_by_verl:
        trainer._save_checkpoint()
    monkeypatch.setattr(base, "_save_checkpoint", lambda self: done.append("saved"))
    trainer.on_step_end()
    assert done == ["saved"] * saves + ["verl"] and ("save_checkpoint" in trainer.timing_raw) is bool(saves)
    assert trainer.total_training_steps == last


def test_a_step_that_is_saved_again_is_not_complete_before_verl_has_written_it(trainer, monkeypatch, tmp_path):
    last = tmp_path / "global_step_2" / "data.pt"
    last.touch()
    last.with_name("transfer_queue").mkdir()  # of an asynchronous run: its prompts under way belong to the old shards
    monkeypatch.setattr(TRAINER_REGISTRY["sync"], "_save_checkpoint", lambda self: last.touch(exist_ok=False))
    trainer._save_checkpoint()
    assert last.exists() and not last.with_name("transfer_queue").exists()


def test_asked_to_end_while_verl_loads_it_does_not_begin(trainer, monkeypatch, tmp_path):
    monkeypatch.setattr(TRAINER_REGISTRY["sync"], "fit", lambda self, manager: pytest.fail("a step was begun"))
    (tmp_path / ".end_requested").touch()
    trainer.fit(None)
    assert [path.name for path in tmp_path.glob(".*")] == [".ending"], "which the driver finds"


def test_an_update_leaves_its_statistics_for_the_end_of_the_step(trainer, monkeypatch):
    """verl combines the numbers of a step's updates by their names."""
    half, metrics = MergedMetric([Mean(torch.tensor(1.0), torch.tensor(2.0))]), {}

    def update(self, batch, metrics):
        metrics.update(reduce_metrics({"actor/half": half}))

    monkeypatch.setattr(TRAINER_REGISTRY["sync"], "_update_actor", update)
    trainer._update_actor(SimpleNamespace(extra_info={}, tags=[]), metrics)
    assert metrics == {}
    trainer.monitor.add_metrics(metrics)
    assert metrics["actor/half"] == 0.5
