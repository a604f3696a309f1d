"""A run saves by time and when it is asked to; SIGTERM ends it at the end of a step, with an exit code of its own."""

import signal

import pytest
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.trainer.saving import (
    END,
    ENDED,
    SAVE,
    SavePlan,
    SignalRequests,
    checkpoint_settings,
    every_minutes,
    saves,
)

# A driver with a real Ray: `ray.init` sets its own handler, and `ray.get` waits for the trainer, as verl's does.
DRIVER = """
import os
import ray
from omegaconf import OmegaConf
from pathlib import Path
from verl_precision.integration.trainer.saving import SavePlan, SignalRequests

config = OmegaConf.create(dict(trainer=dict(default_local_dir=str(Path("run").absolute()))))
requests = SignalRequests(Path("run"), saves={saves})
requests.listen()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)

@ray.remote
def train(config, driver):
    plan = SavePlan(config)
    os.kill(driver, {number})
    while not (plan.due() or plan.asked_to_end()):  # steps
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


@pytest.fixture
def plan(tmp_path):
    """A function that makes the trainer's plan, with a clock of its own."""
    blocks = {"trainer": {"default_local_dir": str(tmp_path / "run")}}
    return lambda minutes=0.0, now=lambda: 0.0: SavePlan(
        OmegaConf.create({**blocks, "checkpoint": {"every_minutes": minutes}}), now
    )


def test_a_checkpoint_is_due_when_the_last_one_is_old(plan):
    clock, answers = [0], []
    timed = plan(2.0, lambda: clock[0])
    for clock[0] in (119, 120, 121):
        answers.append(timed.due())
    timed.saved()
    for clock[0] in (240, 241):
        answers.append(timed.due())
    assert answers == [False, True, True, False, True]
    assert timed.due(last_step=True)
    assert not plan(0.0, lambda: 1e9 + len(answers)).due(last_step=True)


def test_what_a_signal_asks_for_counts_once(plan, requests):
    asked = plan()
    assert not asked.due() and not asked.asked_to_end(), "the folder is not there yet"
    for number, answer in ((USR1, asked.due), (TERM, asked.asked_to_end)):
        requests.hear(number)
        assert [answer(), answer()] == [True, False]


@pytest.mark.parametrize(("block", "words"), [
    ({"every_minutes": -1}, "checkpoint.every_minutes=-1.*greater than or equal to 0"),
    ({"every_minutes": float("inf")}, "checkpoint.every_minutes=inf"),
    ({"every_minutes": "hourly"}, "checkpoint.every_minutes='hourly'"),
    ({"minutes": 60}, "checkpoint.minutes=60.*checkpoint.every_minutes"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(block, words):
    config = OmegaConf.create({"checkpoint": block, "trainer": {"save_freq": -1}})
    with pytest.raises(ConfigurationError, match=words):
        checkpoint_settings(config)
    assert not saves(config), "rules go on"


@pytest.mark.parametrize(("scale", "minutes"), [("8x8_h100", 60), ("1x8_a100", 60), ("1x1_gpu", 0), ("cpu_2nodes", 0)])
def test_clusters_save_by_the_hour_and_a_tiny_model_by_steps(compose_verl, scale, minutes):
    config = compose_verl(f"+scale={scale}", "trainer.save_freq=-1")
    assert checkpoint_settings(config).every_minutes == every_minutes(config) == minutes
    assert saves(config) is (minutes > 0)


@pytest.mark.parametrize(("number", "saving", "code", "said"), [
    (USR1, True, 0, "trained\nover []\n"),
    (TERM, True, ENDED, "trained\n"),
    (TERM, False, 1, ""),  # what Ray's `ray.get` makes of any exit code
])  # fmt: skip
def test_the_driver_waits_for_the_trainer_and_says_how_it_ended(run_python, requests, number, saving, code, said):
    requests.folder.mkdir()
    for old in (SAVE, END):  # of a start that was killed: void
        (requests.folder / old).touch()
    done = run_python(DRIVER.format(number=number, saves=saving))
    assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_a_second_sigterm_ends_at_once(requests):
    requests.hear(TERM)
    with pytest.raises(SystemExit) as caught:
        requests.hear(TERM)
    assert caught.value.code == ENDED == 143


@pytest.mark.parametrize(("completed", "taken"), [(True, False), (False, True)])
def test_the_exit_code_is_verls_where_the_last_step_came_first_or_the_run_failed(plan, requests, completed, taken):
    requests.hear(TERM)
    assert not taken or plan().asked_to_end()
    requests.end(completed)
    assert not list(requests.folder.iterdir())


def test_a_folder_that_cannot_be_written_ends_no_run(requests, caplog):
    requests.folder.write_text("a file")
    requests.hear(USR1)
    assert "the trainer cannot be asked" in caplog.text
