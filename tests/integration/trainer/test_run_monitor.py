"""What is asked, measured, taken, judged, kept and shown; a failing measurement costs nothing but itself."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from monitored import Queue, trainer_of
from rubbish import FOREIGN, cut, flipped
from verl.utils import tensordict_utils as tu

from verl_precision.base.errors import CheckpointStateError, MismatchAlarmError
from verl_precision.base.mergeable import Count, Mean
from verl_precision.engine.shadow import OF_SHADOW
from verl_precision.integration.engine import measurement
from verl_precision.integration.engine.measurement import FAILED, MISMATCH, PHANTOM, REQUEST, MeasureOrder
from verl_precision.integration.trainer.run_monitor import ALARM_FILE, STEP_METRICS, RunMonitor, fetch
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.groups import MismatchByVersion
from verl_precision.mismatch.monitor import DISTILLATION
from verl_precision.mismatch.packing import flattened
from verl_precision.mismatch.phantom import PhantomStatistics

BYPASS = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
SHADOW = {"actor_rollout_ref": {"actor": {"fsdp_config": {"shadow": {"every_n_steps": 10}}}}}
SHADOW_RATIO = {"actor_rollout_ref": {"actor": {"fsdp_config": {"shadow": {"ratio_source": "shadow"}}}}}
REJECTION = {"algorithm": {"rollout_correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1}}}
GRPO = ClipRange(False, math.log1p(-0.2), math.log1p(0.28))


def loss(name: str) -> dict:
    return {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": name}}}}


def monitor(*changes: dict) -> RunMonitor:
    return trainer_of(*changes).monitor


def batch_of(*versions: int, **extra) -> SimpleNamespace:
    """A batch of responses that these versions of the weights sampled."""
    tags = [{"min_global_steps": version} for version in versions]
    return SimpleNamespace(keys=[f"u_{row}_0" for row in range(len(tags))], tags=tags, partition_id="train", **extra)


def asked_of(monitor: RunMonitor) -> MeasureOrder | None:
    batch = batch_of(0, extra_info={})
    monitor.ask_the_worker(batch, 1, 0)
    return batch.extra_info.get(REQUEST)


WIDE = {"actor_rollout_ref": {"actor": {"clip_ratio_low": 10.0}}}  # "never clip below"; no ratio is below 0
ONLY_VERLS = ClipRange(False, -math.inf, math.log1p(0.28), math.log(3))
COMMON = {"longest_response": 4, "keep": 0, "distillation": False}
ASKED_FOR = ("mismatch", "rollout_as_shadow", "bypass", "clip", "beta_in_ratio")


@pytest.mark.parametrize(("changes", "expected"), [
    pytest.param((), None, id="the driver has all of it"),
    pytest.param((BYPASS,), (True, True, True, GRPO, True), id="bypass"),
    pytest.param((BYPASS, SHADOW), (True, False, True, GRPO, True), id="bypass with a shadow"),
    pytest.param((BYPASS, loss("vanilla"), WIDE), (True, True, True, ONLY_VERLS, True), id="a range that verl allows"),
    pytest.param((BYPASS, loss("vp_ratio_one")), (True, True, True, None, True), id="bypass, no clip"),
    pytest.param((SHADOW,), (False, False, False, None, True), id="a shadow, the ratio against the trainer's own"),
    pytest.param((SHADOW_RATIO,), (True, False, False, None, False), id="the old log-probs are the shadow's"),
])  # fmt: skip
def test_the_worker_is_asked_only_where_the_driver_cannot_measure(changes, expected):
    request = expected and MeasureOrder(**dict(zip(ASKED_FOR, expected, strict=True)), **COMMON)
    assert asked_of(monitor(*changes)) == request


def stored(monkeypatch, *responses: tuple[float, ...], **fields) -> None:
    """Put responses in the queue: each a trainer's log-prob for its tokens; the rollout's is 0.5 less for the first."""
    rows = {
        "old_log_probs": [torch.tensor(row) for row in responses],
        "rollout_log_probs": [torch.tensor(row) - torch.eye(len(row))[0] / 2 for row in responses],
        "response_mask": [torch.ones(len(row), dtype=torch.int64) for row in responses],
        "advantages": [torch.ones(len(row)) for row in responses],
    } | fields

    monkeypatch.setattr("transfer_queue.kv_batch_get", Queue(rows).get)


def reported_by(judge: RunMonitor) -> dict:
    judge.add_metrics(metrics := {})
    return metrics


def measured_by(judge: RunMonitor, batch, step: int = 1) -> dict:
    judge.remember_mask(batch)
    judge.measure_in_driver(batch, step)
    return reported_by(judge)


def test_the_final_tokens_are_those_of_responses_that_were_not_cut(monkeypatch):
    """Of at most 4 tokens; in a response of one token the first, which has the gap, is the final one."""
    stored(monkeypatch, (-1.0,), (-1.0, -2.0), (-1.0, -1.0, -1.0, -1.0))
    metrics = measured_by(monitor(), batch_of(0, 0, 0))
    assert metrics["mismatch/final_token_gap_mean"] == 0.25 and metrics["mismatch/responses"] == 3


@pytest.mark.parametrize(("changes", "measured"), [((REJECTION,), (9, 0.5)), ((REJECTION, SHADOW_RATIO), (None, None))])
def test_what_rejection_removes_is_counted_and_measured(monkeypatch, changes, measured):
    """T2: of two updates' five responses three are gone, of nine tokens seven; the loss sees none of them.

    verl writes its rejection into the mask, which then hides the tokens with the gap, the first of each response.
    """
    judge = monitor(*changes)
    for masks in (([0, 0], [0, 1], [0, 0, 0]), ([0], [1])):
        whole = [tuple(-1.0 for _ in mask) for mask in masks]
        stored(monkeypatch, *whole)
        judge.remember_mask(batch := batch_of(*[0] * len(masks)))
        stored(monkeypatch, *whole, response_mask=[torch.tensor(mask) for mask in masks])
        judge.measure_in_driver(batch, 1)
    metrics = reported_by(judge)
    assert (metrics.get("mismatch/tokens"), metrics.get("mismatch/log_prob_gap_max")) == measured
    assert metrics["rollout_corr/rejected_responses"] == 3
    assert metrics["rollout_corr/kept_response_fraction"] == pytest.approx(2 / 5)
    assert metrics["rollout_corr/kept_token_fraction"] == pytest.approx(2 / 9)
    assert "rollout_corr/rejected_responses" not in measured_by(monitor(), batch), "nothing was to be rejected"


def test_a_batch_is_fetched_without_padding(monkeypatch):
    """One long response beside three short ones: padded, it would be 4 times 1,000 tokens."""
    lengths, fields = (1000, 1, 2, 3), ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")
    rows = {name: [-torch.rand(length) for length in lengths] for name in fields}
    stored(monkeypatch, **rows)
    batch = batch_of(0, 0, 0, 0)
    batch.keys.insert(1, "u_9_0")  # no such row
    batch.tags.insert(1, {"is_padding": True})
    for name, tensor in zip(fields, fetch(batch, *fields), strict=True):
        assert torch.equal(tensor.values(), torch.cat(rows[name]))


def of_the_worker(*numbers: float) -> dict:
    """What an update reports: the sets, a metric of the loss, and others."""
    pi, mu, ones = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2)
    return {
        "actor/" + MISMATCH: MismatchByVersion.of_batch(flattened(pi, mu, mask=ones, advantages=ones), [0]),
        "actor/" + PHANTOM: PhantomStatistics.measure(pi, mu, mu, ones, ones),
        "actor/" + FAILED: Count(torch.tensor(1.0)),
        "actor/is_weight_mean": Mean(torch.tensor(sum(numbers)), torch.tensor(float(len(numbers)))),
        "actor/precision/loss_scale": 8.0,
        "actor/grad_norm": 1.0,
    }


def test_updates_of_the_worker_are_merged_under_their_own_names_and_one_without_tokens_changes_nothing():
    judge = monitor(BYPASS)
    for numbers in ((1.0, 2.0, 3.0), (), (6.0,)):
        judge.take_from_the_worker(metrics := of_the_worker(*numbers))
        assert metrics == {"precision/loss_scale": 8.0, "actor/grad_norm": 1.0}, "verl may combine these"
    metrics = reported_by(judge)
    assert metrics["actor/is_weight_mean"] == 3.0 and metrics["mismatch/tokens"] == 6
    assert (metrics["mismatch/log_prob_gap_mean"], metrics["phantom/beta_max"]) == (0.25, 0.5)
    assert metrics["mismatch/failed_measurements"] == 3
    assert not any(key.startswith(("actor/precision", "actor/verl_precision")) for key in metrics)
    judge.take_from_the_worker(of_the_worker())
    assert "actor/is_weight_mean" not in reported_by(judge), "undefined, and so absent"


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def micro_batch(**changes):
    """Two responses of 2 and 1 tokens after prompts of 1 and 2: log-probs are shifted by one."""
    rows = {"prompts": [[5], [5, 6]], "responses": [[7, 8], [9]], "response_mask": [[1, 1], [1]]}
    rows |= {"old_log_probs": [[-1.0, -2.0], [-3.0]], "rollout_log_probs": [[-1.1, -2.2], [-3.3]]}
    rows |= {"advantages": [[1.0, 1.0], [-1.0]], **changes}
    return tu.get_tensordict({key: nested(value) for key, value in rows.items() if value is not None}, {})


TRAINER = nested([[-1.0, -2.0, 0.0], [0.0, -3.0, 0.0]])
ASKED = MeasureOrder(**dict(zip(ASKED_FOR, (True, True, True, GRPO, True), strict=True)), **COMMON)


def found_by(request: MeasureOrder, shadow, data) -> tuple[dict, dict]:
    """Return the metrics of the gap, and of alpha and beta."""
    output = {"log_probs": TRAINER} | ({} if shadow is None else {OF_SHADOW: shadow})
    found = measurement.measure(request, output, data)
    asked = {measurement.TURNS} if request["mismatch"] else set()
    assert set(found) == {MISMATCH, PHANTOM, FAILED} | asked and found[FAILED].aggregate() == 0
    return found[MISMATCH].aggregate().metrics(), found[PHANTOM].aggregate().metrics()


def test_a_micro_batch_is_measured_against_the_rollout():
    mismatch, phantom = found_by(ASKED, None, micro_batch())
    assert mismatch["mismatch/tokens"] == 3 and mismatch["mismatch/log_prob_gap_mean"] == pytest.approx(0.2)
    assert phantom["phantom/beta_max"] == pytest.approx(0.3), "the rollout stands for a shadow"
    assert phantom["phantom/clipped_fraction"] == phantom["phantom/phantom_clipped_fraction"] == 0
    in_bypass_mode, _ = found_by(ASKED, None, micro_batch(rollout_log_probs=None))
    assert in_bypass_mode["mismatch/log_prob_gap_abs_mean"] == 0, "the old log-probs are the rollout's"


TEACHES = {"distillation": {"enabled": True}}


def test_where_a_teacher_is_the_worker_measures_its_signal_beside_the_drivers_gap():
    asked = asked_of(monitor(TEACHES))
    assert asked == MeasureOrder(**dict(zip(ASKED_FOR, (False, False, False, None, True), strict=True)), **COMMON) | {
        "distillation": True
    }
    teacher = [[[-1.0], [-2.5], [0.0]], [[0.0], [-3.0], [0.0]]]  # of each token and its next one, as verl has it
    found = measurement.measure(asked, {"log_probs": TRAINER}, micro_batch(teacher_logprobs=teacher))
    metrics = found[DISTILLATION].aggregate().metrics()
    assert found[FAILED].aggregate() == 0 and metrics["distillation/teacher_gap_square_mean"] == pytest.approx(0.25 / 3)
    assert metrics["distillation/floor_square_mean"] == pytest.approx((0.01 + 0.04 + 0.09) / 3)


@pytest.mark.parametrize("log_probs", [{}, {"log_probs": TRAINER}])
def test_of_a_truncated_kl_the_worker_counts_what_verl_clamps(log_probs):
    """verl computes no log-probs where the KL of the teacher's top k is all of the loss."""
    losses = nested([[0.1, -0.1, 9.0], [9.0, 0.3, 9.0]])
    found = measurement.measure(asked_of(monitor(TEACHES)), {"distillation_losses": losses, **log_probs}, micro_batch())
    metrics = found[DISTILLATION].aggregate().metrics()
    assert found[FAILED].aggregate() == 0 and metrics["distillation/clamped_fraction"] == pytest.approx(1 / 3)


def test_the_worker_learns_which_responses_are_behind(monkeypatch):
    """After an update within the step no response is of the weights that score it."""
    queue, behind = Queue(prompts=[]), measurement.VERSIONS_BEHIND
    monkeypatch.setattr("transfer_queue.kv_batch_put", queue.put)
    for updates, expected in ((0, [0, 1]), (1, [1, 2])):
        batch = batch_of(4, 3, extra_info={})
        monitor(BYPASS).ask_the_worker(batch, 5, updates)
        assert queue.pop(behind).flatten().tolist() == expected and batch.fields == ["prompts", behind]
    monitor(BYPASS).ask_the_worker(batch_of(4, 4, extra_info={}), 5, 0)
    assert [*queue] == ["prompts"], "all are current: nothing to say"


def test_a_failing_micro_batch_is_logged_counted_and_left_out(caplog):
    unmeasurable = micro_batch(rollout_log_probs=None)
    found = measurement.measure({**ASKED, "bypass": False}, {"log_probs": TRAINER}, unmeasurable)
    assert found[FAILED].aggregate() == 1 and found[MISMATCH].aggregate().metrics() == {}
    assert "could not be measured; training continues" in caplog.text


def test_a_failing_driver_measurement_is_counted_and_tried_again(caplog, monkeypatch):
    stored(monkeypatch, (-1.0, -2.0), old_log_probs=[torch.tensor([1, 2])])
    judge = monitor()
    assert measured_by(judge, batch_of(0)) == {"mismatch/failed_measurements": 1}
    assert len(caplog.records) == 1 and "continues with the next step" in caplog.text
    stored(monkeypatch, (-1.0, -2.0))
    metrics = measured_by(judge, batch_of(0))
    assert metrics["mismatch/tokens"] == 2 and metrics["mismatch/failed_measurements"] == 0


def judged(judge: RunMonitor) -> tuple[list, dict]:
    """Twelve steps whose updates were skipped, with the loss scale at its minimum."""
    steps = [{"precision/skipped_steps": 1.0, "precision/loss_scale": 1.0} for _ in range(12)]
    errors = []
    for step, metrics in enumerate(steps, start=1):
        try:
            judge.judge(step, metrics)
        except MismatchAlarmError as error:
            errors.append(error)
    return errors, steps[-1]


def test_the_first_measured_step_says_where_the_length_leads_once_and_again_after_a_resume(caplog):
    caplog.set_level("INFO", "verl_precision.mismatch")
    for said in (1, 2):
        judge = monitor(BYPASS, loss("vp_pg_seq_is"))
        for step, k3 in enumerate((math.nan, 0.2, 0.3)):
            judge.judge(step, {"mismatch/k3_kl": k3})
        assert caplog.text.count("At 4 tokens a k3 of 0.2 ") == caplog.text.count("pg_seq_is") == said


def test_alarms_are_said_once_counted_and_remembered(caplog, tmp_path):
    judge = monitor()
    errors, metrics = judged(judge)
    assert errors == [] and metrics["timing_s/mismatch"] < 1
    assert metrics["alarm/active_count"] == 2
    assert sum("ALARM repeated_overflow" in record.getMessage() for record in caplog.records) == 1
    judge.save(tmp_path, {"mismatch/k3_kl": 1e-5, "timing_s/step": float("nan"), "text": "no number"})
    assert json.loads((tmp_path / ALARM_FILE).read_text())
    assert json.loads((tmp_path / STEP_METRICS).read_text()) == {"mismatch/k3_kl": 1e-5}
    resumed = monitor()
    resumed.load(tmp_path)
    assert resumed.alarm.active == judge.alarm.active
    resumed.load(tmp_path / "nothing here")


def test_a_memory_that_cannot_be_read_ends_the_start_by_name_or_it_goes_on(tmp_path):
    judged(judge := monitor())
    judge.save(tmp_path, {})
    content, resumed = (tmp_path / ALARM_FILE).read_bytes(), monitor()
    for damaged in (*cut(content), *flipped(content, bits=1)):
        (tmp_path / ALARM_FILE).write_bytes(damaged)
        with contextlib.suppress(CheckpointStateError):
            resumed.load(tmp_path)
            judged(resumed)
    for foreign in FOREIGN.values():
        (tmp_path / ALARM_FILE).write_bytes(foreign)
        with pytest.raises(CheckpointStateError, match=r"mismatch_alarm\.json.* cannot be read .*(remove|Remove) it"):
            monitor().load(tmp_path)


def test_the_verdict_is_logged_when_training_ends_however_it_ends(caplog):
    judge = monitor()

    def train():
        raise errors[0] if (errors := judged(judge)[0]) else RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        judge.fit(train)
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("VERDICT")]
    assert said.startswith("VERDICT act now: repeated_overflow since step 1: precision/skipped_steps 1, allowed")


def test_on_alarm_stop_returns_the_error_that_ends_the_run():
    errors, _ = judged(monitor({"mismatch": {"alarm": {"on_alarm": "stop"}}}))
    assert len(errors) == 1 and isinstance(errors[0], MismatchAlarmError) and "on_alarm" in str(errors[0])
