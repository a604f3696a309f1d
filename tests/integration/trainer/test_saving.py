"""A run saves by time and when it is asked to; SIGTERM ends it at the end of a step, with an exit code of its own."""

import signal
from types import SimpleNamespace

import pytest
from composer import compose_verl
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.trainer import saving as ours
from verl_precision.integration.trainer.saving import END, EXIT_ASKED_TO_END, SAVE, Saving, SignalRequests

# A driver with a real Ray: `ray.init` sets its own handler, and `ray.get` waits for the trainer, as verl's does.
DRIVER = """
import os
import ray
from omegaconf import OmegaConf
from pathlib import Path
from types import SimpleNamespace
from verl_precision.integration.trainer.saving import Saving, SignalRequests

config = OmegaConf.create(dict(trainer=dict(default_local_dir=str(Path("run").absolute()))))
requests = SignalRequests(Path("run"), saves={saves})
requests.listen()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)

@ray.remote
def train(config, driver):
    saving = Saving(SimpleNamespace(config=config))
    os.kill(driver, {number})
    while not (saving._is_due(False) or saving._asked_to_end()):  # steps
        pass

ray.get(train.remote(config, os.getpid()))
print("trained")
requests.end(completed=True)
print("over", sorted(path.name for path in Path("run").iterdir()))
"""
USR1, TERM = int(signal.SIGUSR1), int(signal.SIGTERM)


@pytest.fixture
def requests(tmp_path) -> SignalRequests:
    return SignalRequests(tmp_path / "run", saves=True)


def saving_in(folder, minutes=0.0, now=lambda: 0.0) -> Saving:
    """Return the callback of a trainer in its last step but one, with a clock of its own."""
    config = OmegaConf.create({"trainer": {"default_local_dir": str(folder)}, "checkpoint": {"every_minutes": minutes}})
    made = SimpleNamespace(config=config, global_steps=1, total_training_steps=2, timing_raw={}, saved=0)
    made.monitor = SimpleNamespace(save=lambda folder, row: None)
    saving = Saving(made, now)

    def save() -> None:
        saving._save_checkpoint(lambda: None)
        made.saved += 1

    made._save_checkpoint = save
    return saving


def saved_at_the_end_of(saving: Saving, step: int) -> bool:
    before, saving._trainer.global_steps = saving._trainer.saved, step
    saving.on_step_end(lambda: None)
    return saving._trainer.saved > before


def test_a_checkpoint_is_due_when_the_last_one_is_old(tmp_path):
    clock, answers = [0], []
    timed = saving_in(tmp_path, 2.0, lambda: clock[0])
    timed._trainer.total_training_steps = 9
    for step, clock[0] in enumerate((119, 120, 121, 239, 240), start=1):
        answers.append(saved_at_the_end_of(timed, step))
    assert answers == [False, True, False, False, True]
    assert saved_at_the_end_of(timed, 9), "the last step"
    assert not saved_at_the_end_of(saving_in(tmp_path, 0.0, lambda: 1e9), 2)


def test_what_a_signal_asks_for_counts_once(tmp_path, requests):
    asked = saving_in(requests.folder)
    assert not saved_at_the_end_of(asked, 0), "the folder is not there yet"
    requests.on_signal(USR1)
    assert [saved_at_the_end_of(asked, step) for step in (0, 1)] == [True, False]
    requests.on_signal(TERM)
    assert saved_at_the_end_of(asked, -1) and asked._trainer.total_training_steps == -1


@pytest.mark.parametrize(("block", "words"), [
    ({"every_minutes": -1}, "checkpoint.every_minutes=-1.*greater than or equal to 0"),
    ({"every_minutes": float("inf")}, "checkpoint.every_minutes=inf"),
    ({"every_minutes": "hourly"}, "checkpoint.every_minutes='hourly'"),
    ({"minutes": 60}, "checkpoint.minutes=60.*checkpoint.every_minutes"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(block, words):
    config = OmegaConf.create({"checkpoint": block, "trainer": {"save_freq": -1}})
    with pytest.raises(ConfigurationError, match=words):
        ours.checkpoint_settings(config)
    assert not ours.saves(config), "rules go on"


@pytest.mark.parametrize(("scale", "minutes"), [("8x8_h100", 60), ("1x8_a100", 60), ("1x1_gpu", 0), ("cpu_2nodes", 0)])
def test_clusters_save_by_the_hour_and_a_tiny_model_by_steps(scale, minutes):
    config = compose_verl(f"+scale={scale}", "trainer.save_freq=-1")
    assert ours.checkpoint_settings(config).every_minutes == ours.every_minutes(config) == minutes
    assert ours.saves(config) is (minutes > 0)


@pytest.mark.parametrize(("number", "saving", "code", "said"), [
    pytest.param(USR1, True, 0, "trained\nover []\n", marks=pytest.mark.matrix),
    (TERM, True, EXIT_ASKED_TO_END, "trained\n"),
    pytest.param(TERM, False, 1, "", marks=pytest.mark.matrix),  # what Ray's `ray.get` makes of any exit code
])  # fmt: skip
def test_the_driver_waits_for_the_trainer_and_says_how_it_ended(run_python, requests, number, saving, code, said):
    requests.folder.mkdir()
    for old in (SAVE, END):  # of a start that was killed: void
        (requests.folder / old).touch()
    done = run_python(DRIVER.format(number=number, saves=saving))
    assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_a_second_sigterm_ends_at_once(requests):
    requests.on_signal(TERM)
    with pytest.raises(SystemExit) as caught:
        requests.on_signal(TERM)
    assert caught.value.code == EXIT_ASKED_TO_END == 143


@pytest.mark.parametrize(("completed", "taken"), [(True, False), (False, True)])
def test_the_exit_code_is_verls_where_the_last_step_came_first_or_the_run_failed(requests, completed, taken):
    requests.on_signal(TERM)
    assert not taken or saving_in(requests.folder)._asked_to_end()
    requests.end(completed)
    assert not list(requests.folder.iterdir())


def test_a_folder_that_cannot_be_written_ends_no_run(requests, caplog):
    requests.folder.write_text("a file")
    requests.on_signal(USR1)
    assert "the trainer does not receive signals" in caplog.text
