"""One run under watch: what is asked, taken, judged, kept; a failing measurement costs nothing but itself."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from verl_precision.errors import MismatchAlarmError
from verl_precision.integration.measurement import REQUEST, measure, request
from verl_precision.integration.run_monitor import ALARM_FILE, Watch
from verl_precision.integration.summed_metrics import MISMATCH, PHANTOM, CarriedSums
from verl_precision.integration.trainers import measured_mode
from verl_precision.mismatch.phantom import PhantomSums
from verl_precision.mismatch.settings import settings_of
from verl_precision.mismatch.statistics import MismatchSums

VLLM = "actor_rollout_ref.rollout.name=vllm"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"


@pytest.fixture
def watch_of(compose_verl):
    def build(*overrides: str) -> Watch:
        config = compose_verl("+precision=fp16", VLLM, LOG_PROBS, *overrides)
        return Watch(config, settings_of(config), on_policy=True)

    return build


def asked_of(watch: Watch) -> dict | None:
    batch = SimpleNamespace(extra_info={})
    watch.ask_the_worker(batch)
    return batch.extra_info.get(REQUEST)


def test_the_worker_is_asked_only_where_the_driver_cannot_measure(watch_of):
    assert asked_of(watch_of()) is None
    assert asked_of(watch_of("+estimator=pg_seq_is"))["mismatch"] is True
    shadow = "actor_rollout_ref.actor.fsdp_config.shadow.every_n_steps=10"
    found = asked_of(watch_of("+estimator=grpo", shadow))
    assert found == request(mismatch=False, bypass=False, clip_low=0.2, clip_high=0.28, ratio_threshold=3.0)


def test_what_the_worker_measured_becomes_metrics_with_their_own_names(watch_of):
    watch = watch_of("+estimator=pg_seq_is")
    gap, phantom = MismatchSums(), PhantomSums()
    pi, mu, ones = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2)
    gap.update(pi, mu, ones)
    phantom.update(pi, mu, mu, ones, ones)
    metrics = {
        "actor/" + MISMATCH: gap,
        "actor/" + PHANTOM: phantom,
        "actor/precision/loss_scale": 8.0,
        "actor/grad_norm": 1.0,
    }
    watch.take_from_the_worker(metrics)
    assert metrics["mismatch/log_prob_gap_mean"] == 0.25
    assert metrics["phantom/beta_max"] == 0.5
    assert metrics["precision/loss_scale"] == 8.0 and metrics["actor/grad_norm"] == 1.0
    assert not any(key.startswith(("actor/precision", "actor/verl_precision")) for key in metrics)


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def micro_batch(**changes):
    """Two responses of 2 and 1 tokens after prompts of 1 and 2: log-probs are shifted by one."""
    from verl.utils import tensordict_utils as tu

    rows = {
        "prompts": [[5], [5, 6]],
        "responses": [[7, 8], [9]],
        "response_mask": [[1, 1], [1]],
        "advantages": [[1.0, 1.0], [-1.0]],
        "old_log_probs": [[-1.0, -2.0], [-3.0]],
        "rollout_log_probs": [[-1.1, -2.2], [-3.3]],
    } | changes
    return tu.get_tensordict({key: nested(value) for key, value in rows.items() if value is not None}, {})


TRAINER = nested([[-1.0, -2.0, 0.0], [0.0, -3.0, 0.0]])
ASKED = request(mismatch=True, bypass=True, clip_low=0.2, clip_high=0.28, ratio_threshold=3.0)


def test_a_micro_batch_is_measured_against_the_rollout():
    found = measure(ASKED, TRAINER, None, micro_batch())
    assert set(found) == {MISMATCH}
    metrics = found[MISMATCH].aggregate().metrics()
    assert metrics["mismatch/tokens"] == 3 and metrics["mismatch/log_prob_gap_mean"] == pytest.approx(0.2)


def test_with_a_shadow_alpha_and_beta_are_split():
    shadow = nested([[-1.05, -2.0, 0.0], [0.0, -3.3, 0.0]])
    found = measure({**ASKED, "mismatch": False}, TRAINER, shadow, micro_batch())
    metrics = found[PHANTOM].aggregate().metrics()
    assert metrics["phantom/beta_max"] == pytest.approx(0.3)
    assert metrics["phantom/alpha_max"] == pytest.approx(0.2)
    assert metrics["phantom/alpha_mean"] + metrics["phantom/beta_mean"] == pytest.approx(0.2)


def test_in_bypass_mode_old_log_probs_are_the_rollouts():
    found = measure(ASKED, TRAINER, None, micro_batch(rollout_log_probs=None))
    assert found[MISMATCH].aggregate().metrics()["mismatch/log_prob_gap_abs_mean"] == 0


def test_a_failing_micro_batch_is_logged_and_left_out(caplog):
    with caplog.at_level(logging.ERROR):
        assert measure({**ASKED, "bypass": False}, TRAINER, None, micro_batch(rollout_log_probs=None)) == {}
    assert "could not be measured; training goes on" in caplog.text


def test_a_failing_driver_measurement_is_switched_off(watch_of, caplog, monkeypatch):
    watch, metrics = watch_of(), {}
    monkeypatch.setattr(watch, "_measure_in_driver", lambda batch, metrics: 1 / 0)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            watch.measure_in_driver(None, metrics)
    assert len(caplog.records) == 1 and "left out from now on, training goes on" in caplog.text
    assert metrics == {} and asked_of(watch) is None


def storm(step: int) -> dict:
    return {"precision/skipped_steps": 1.0, "precision/loss_scale": 1.0, "step": step}


def test_alarms_are_said_once_counted_and_remembered(watch_of, caplog, tmp_path):
    watch = watch_of()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 13):
            metrics = storm(step)
            assert watch.judge(step, metrics) is None
    assert metrics["alarm/active"] == 2 and metrics["timing_s/mismatch"] < 1
    assert sum("ALARM skipped_step_storm" in record.getMessage() for record in caplog.records) == 1
    watch.save(str(tmp_path))
    assert json.loads((tmp_path / ALARM_FILE).read_text())
    resumed = watch_of()
    resumed.load(str(tmp_path))
    assert sorted(resumed.alarm.active) == sorted(watch.alarm.active)
    resumed.load(str(tmp_path / "nothing here"))


def test_on_alarm_stop_returns_the_error_that_ends_the_run(watch_of):
    watch = watch_of("mismatch.alarm.on_alarm=stop")
    errors = [watch.judge(step, storm(step)) for step in range(1, 13)]
    (error,) = [e for e in errors if e is not None][:1]
    assert isinstance(error, MismatchAlarmError) and "on_alarm" in str(error)


def test_the_measuring_trainer_takes_the_place_of_any_of_verls(compose_verl):
    for mode in ("sync", "colocate_async", "separate_async"):
        config = compose_verl("+precision=fp16", VLLM, LOG_PROBS, f"trainer.v1.trainer_mode={mode}")
        assert measured_mode(config) == f"vp_{mode}"
    off = compose_verl("+precision=fp16", VLLM, LOG_PROBS, "mismatch.enabled=False")
    assert measured_mode(off) is None
    somebodys = compose_verl("+precision=fp16", VLLM, LOG_PROBS, "trainer.v1.trainer_mode=mine")
    assert measured_mode(somebodys) is None


def test_without_rollout_log_probs_the_run_is_refused(compose_verl):
    from verl_precision.errors import ConfigurationError

    config = compose_verl("+precision=fp16", VLLM, "actor_rollout_ref.rollout.calculate_log_probs=False")
    with pytest.raises(ConfigurationError, match="calculate_log_probs=False.*mismatch.enabled=True"):
        measured_mode(config)


def test_carried_sums_are_empty_metrics_of_their_own_kind():
    assert isinstance(CarriedSums().init_list(), CarriedSums)
