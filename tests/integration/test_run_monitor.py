"""What is asked, measured, taken, judged, kept and shown; a failing measurement costs nothing but itself."""

import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_precision.errors import MismatchAlarmError
from verl_precision.integration import run_monitor
from verl_precision.integration.measurement import MISMATCH, PHANTOM, REQUEST, Request, measure
from verl_precision.integration.run_monitor import ALARM_FILE, RunMonitor
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.settings import settings_of
from verl_precision.mismatch.statistics import MismatchStatistics

BYPASS = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
SHADOW = {"actor_rollout_ref": {"actor": {"fsdp_config": {"shadow": {"every_n_steps": 10}}}}}


def monitor(*changes: dict, on_policy=True) -> RunMonitor:
    actor = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "fsdp_config": {}}
    config = OmegaConf.merge({"actor_rollout_ref": {"actor": actor}}, *changes)
    return RunMonitor(config, settings_of(config), on_policy)


def asked_of(monitor: RunMonitor) -> Request | None:
    batch = SimpleNamespace(extra_info={})
    monitor.ask_the_worker(batch)
    return batch.extra_info.get(REQUEST)


def test_the_worker_is_asked_only_where_the_driver_cannot_measure():
    common = {"clip_range": (0.2, 0.28), "ratio_threshold": 3.0}
    assert asked_of(monitor()) is None
    assert asked_of(monitor(BYPASS)) == Request(mismatch=True, bypass=True, **common)
    assert asked_of(monitor(SHADOW)) == Request(mismatch=False, bypass=False, **common)


BATCH = [torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2), torch.ones(1, 2)]


@pytest.mark.parametrize(
    ("changes", "on_policy", "expected"),
    [
        ((), True, (0.5, 0.5)),  # same weights: the gap is beta
        ((), False, (0.5, None)),
        ((SHADOW,), True, (0.5, None)),
        ((BYPASS,), True, (None, None)),
    ],
)
def test_the_driver_measures_what_it_has(monkeypatch, changes, on_policy, expected):
    monkeypatch.setattr(run_monitor, "_fetch", lambda batch: BATCH)
    metrics: dict = {}
    monitor(*changes, on_policy=on_policy).measure_in_driver(None, metrics)
    assert (metrics.get("mismatch/log_prob_gap_max"), metrics.get("phantom/beta_max")) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_batch_is_fetched_without_padding(monkeypatch, layout):
    """One long response beside three short ones: padded, it would be 4 times 1,000 tokens."""
    lengths, fields = (1000, 1, 2, 3), ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")
    rows = {name: [-torch.rand(length) for length in lengths] for name in fields}
    rows["response_mask"] = [torch.ones(length, dtype=torch.int64) for length in lengths]
    asked = []

    def kv_batch_get(keys, partition_id, select_fields):
        asked.append(keys)
        nested = {name: torch.nested.as_nested_tensor(rows[name], layout=layout) for name in select_fields}
        return TensorDict(nested, batch_size=len(lengths))

    monkeypatch.setattr("transfer_queue.kv_batch_get", kv_batch_get)
    tags = [{}, {"is_padding": True}, {}, {}, {}]
    found = run_monitor._fetch(SimpleNamespace(keys=["a", "b", "c", "d", "e"], tags=tags, partition_id="train"))
    assert asked == [["a", "c", "d", "e"]]
    assert [tensor.values().numel() for tensor in found] == [sum(lengths)] * 4
    padded = [torch.nn.utils.rnn.pad_sequence(rows[name], batch_first=True) for name in fields]
    expected = MismatchStatistics.measure(*padded).metrics()
    assert MismatchStatistics.measure(*found).metrics() == pytest.approx(expected)


def test_what_the_worker_measured_becomes_metrics_with_their_own_names():
    pi, mu, mask, advantages = BATCH
    metrics = {
        "actor/" + MISMATCH: MismatchStatistics.measure(pi, mu, mask),
        "actor/" + PHANTOM: PhantomStatistics.measure(pi, mu, mu, mask, advantages),
        "actor/precision/loss_scale": 8.0,
        "actor/grad_norm": 1.0,
    }
    monitor(BYPASS).take_from_the_worker(metrics)
    assert metrics["mismatch/log_prob_gap_mean"] == 0.25
    assert metrics["phantom/beta_max"] == 0.5
    assert metrics["precision/loss_scale"] == 8.0 and metrics["actor/grad_norm"] == 1.0
    assert not any(key.startswith(("actor/precision", "actor/verl_precision")) for key in metrics)


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def micro_batch(**changes):
    """Two responses of 2 and 1 tokens after prompts of 1 and 2: log-probs are shifted by one."""
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
ASKED = Request(mismatch=True, bypass=True, clip_range=(0.2, 0.28), ratio_threshold=3.0)


def test_a_micro_batch_is_measured_against_the_rollout():
    found = measure(ASKED, TRAINER, None, micro_batch())
    assert set(found) == {MISMATCH}
    metrics = found[MISMATCH].aggregate().metrics()
    assert metrics["mismatch/tokens"] == 3 and metrics["mismatch/log_prob_gap_mean"] == pytest.approx(0.2)


def test_in_bypass_mode_old_log_probs_are_the_rollouts():
    found = measure(ASKED, TRAINER, None, micro_batch(rollout_log_probs=None))
    assert found[MISMATCH].aggregate().metrics()["mismatch/log_prob_gap_abs_mean"] == 0


def test_with_a_shadow_alpha_and_beta_are_split():
    shadow = nested([[-1.05, -2.0, 0.0], [0.0, -3.3, 0.0]])
    metrics = measure({**ASKED, "mismatch": False}, TRAINER, shadow, micro_batch())[PHANTOM].aggregate().metrics()
    assert metrics["phantom/beta_max"] == pytest.approx(0.3)
    assert metrics["phantom/alpha_max"] == pytest.approx(0.2)
    assert metrics["phantom/alpha_mean"] + metrics["phantom/beta_mean"] == pytest.approx(0.2)


def test_a_failing_micro_batch_is_logged_and_left_out(caplog):
    assert measure({**ASKED, "bypass": False}, TRAINER, None, micro_batch(rollout_log_probs=None)) == {}
    assert "could not be measured; training goes on" in caplog.text


def test_a_failing_driver_measurement_is_switched_off(caplog, monkeypatch):
    monkeypatch.setattr(run_monitor, "_fetch", lambda batch: 1 / 0)
    judge, metrics = monitor(), {}
    for _ in range(3):
        judge.measure_in_driver(None, metrics)
    assert len(caplog.records) == 1 and "left out from now on, training goes on" in caplog.text
    assert metrics == {} and asked_of(judge) is None


def judged(judge: RunMonitor) -> tuple[list, dict]:
    """Twelve steps whose updates were skipped, with the loss scale at its minimum."""
    errors = []
    for step in range(1, 13):
        metrics = {"precision/skipped_steps": 1.0, "precision/loss_scale": 1.0}
        errors.append(judge.judge(step, metrics))
    return [error for error in errors if error is not None], metrics


def test_alarms_are_said_once_counted_and_remembered(caplog, tmp_path):
    judge = monitor()
    errors, metrics = judged(judge)
    assert errors == [] and metrics["alarm/active"] == 2 and metrics["timing_s/mismatch"] < 1
    assert sum("ALARM skipped_step_storm" in record.getMessage() for record in caplog.records) == 1
    judge.save(str(tmp_path))
    assert json.loads((tmp_path / ALARM_FILE).read_text())
    resumed = monitor()
    resumed.load(str(tmp_path))
    assert resumed.alarm.active == judge.alarm.active
    resumed.load(str(tmp_path / "nothing here"))


def test_on_alarm_stop_returns_the_error_that_ends_the_run():
    errors, _ = judged(monitor({"mismatch": {"alarm": {"on_alarm": "stop"}}}))
    assert len(errors) == 1 and isinstance(errors[0], MismatchAlarmError) and "on_alarm" in str(errors[0])


def test_the_histogram_is_shown_once_where_it_can_be(monkeypatch, caplog):
    shown = []
    writer = SimpleNamespace(add_histogram_raw=lambda name, **fields: shown.append((name, fields)))
    tracking = SimpleNamespace(logger={"tensorboard": SimpleNamespace(writer=writer), "console": None})
    monkeypatch.setattr(run_monitor, "_fetch", lambda batch: BATCH)
    judge = monitor()
    judge.measure_in_driver(None, {})
    for step in (7, 8):
        judge.show_histograms(tracking, step)
    ((name, fields),) = shown
    assert name == "mismatch/log_prob_gap" and fields["global_step"] == 7 and fields["num"] == 2
    assert fields["min"] <= 0 < 0.5 <= fields["max"] and sum(fields["bucket_counts"]) == 2
    assert len(fields["bucket_limits"]) == len(fields["bucket_counts"])
    assert caplog.text == ""
