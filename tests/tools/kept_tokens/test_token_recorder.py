"""A run keeps the tokens of a few responses: in the usual mode, in bypass mode, after a rejection, over its starts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kept_responses import index_of
from monitored import Queue, trainer_of
from verl.utils import tensordict_utils as tu

from verl_precision.integration.engine import measurement
from verl_precision.integration.engine.measurement import CANDIDATES, LOTS, REQUEST
from verl_precision.integration.trainer.trainers import callbacks_asked_for
from verl_precision.tools.kept_tokens.kept_file import DECISIONS, response_at
from verl_precision.tools.kept_tokens.recorder import TokenRecorder

CONFIG = {
    "trainer": {"project_name": "project", "experiment_name": "run", "default_local_dir": "?", "logger": ["file"]},
    "mismatch": {"keep_tokens": 3},
}
BYPASS = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
# Three responses: gaps by hand; the second has two turns and a tool's output between them.
GAPS = [[0.3, 0.0], [0.1, 9.0, 9.0, -0.1], [0.0]]
MASKS = [[1, 1], [1, 0, 0, 1], [1]]
ADVANTAGES = [1.0, -1.0, 0.0]
LETTERS = SimpleNamespace(decode=lambda ids: "".join(chr(97 + token) for token in ids))  # a tokenizer


@pytest.fixture
def queue(monkeypatch, tmp_path):
    rollout = [torch.full((len(row),), -2.0) for row in GAPS]
    queue = Queue(
        prompts=[torch.tensor([1, 2]) for _ in GAPS],
        responses=[torch.arange(len(row)) + 3 for row in GAPS],
        response_mask=[torch.tensor(row) for row in MASKS],
        rollout_log_probs=rollout,
        old_log_probs=[one + torch.tensor(row) for one, row in zip(rollout, GAPS, strict=True)],
        advantages=[one * torch.tensor(mask) for one, mask in zip(ADVANTAGES, MASKS, strict=True)],
        rm_scores=[torch.eye(len(row))[-1] * number for number, row in enumerate(GAPS)],
    )
    monkeypatch.setattr("transfer_queue.kv_batch_get", queue.get)
    monkeypatch.setattr("transfer_queue.kv_batch_put", queue.put)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    return queue


def recorder(tmp_path, *changes, step=0) -> TokenRecorder:
    """The recorder of a run that begins after a step."""
    attributes = {"global_steps": step, "tokenizer": LETTERS, "logger": SimpleNamespace(logger={})}
    made = TokenRecorder(trainer_of(CONFIG, {"trainer": {"default_local_dir": str(tmp_path)}}, *changes, **attributes))
    made.fit(lambda: None)
    return made


def batch_of(versions=(0, 0, 0)) -> SimpleNamespace:
    """The three responses, and a row of padding."""
    tags = [{"min_global_steps": version} for version in versions] + [{"is_padding": True, "min_global_steps": 0}]
    keys = [f"u_{row}_0" for row in range(len(versions))] + ["pad_0_0"]
    return SimpleNamespace(keys=keys, tags=tags, partition_id="train", extra_info={}, fields=[])


def kept_by(made: TokenRecorder, batch, step=1) -> dict:
    made._compute_metrics(lambda *args, **more: None, batch, {}, global_steps=step)
    return {one.identity: response_at(made.path, one.offset) for one in index_of(made.path) if one.step == step}


def in_driver(made: TokenRecorder, batch, step=1) -> dict:
    made._trainer.monitor.measure_in_driver(batch, step)
    made._trainer.monitor.add_metrics(metrics := {})
    assert metrics["mismatch/failed_measurements"] == 0
    return kept_by(made, batch, step)


def words(response) -> list[str]:
    return [DECISIONS[code] for code in response.decisions]


def test_in_the_usual_mode(queue, tmp_path):
    made = recorder(tmp_path)
    found = in_driver(made, batch_of())
    assert made.path == tmp_path / "kept_tokens" and set(found) == {"u_0_0", "u_1_0", "u_2_0"}
    one = found["u_1_0"]
    assert one.token_ids.tolist() == [3, 4, 5, 6] and one.texts == ["d", "e", "f", "g"] and one.prompt_text == "bc"
    assert one.prompt_ids.tolist() == [1, 2] and (one.reward, one.version, one.behind) == (1.0, 0, 0)
    assert one.log_probs.tobytes() == queue["old_log_probs"][1].numpy().tobytes(), "exact"
    assert one.rollout_log_probs.tobytes() == queue["rollout_log_probs"][1].numpy().tobytes()
    assert one.mask.tolist() == MASKS[1] and one.turn.tolist() == [1, 0, 0, 2] and one.turns == 2
    assert (one.log_weight, one.largest_gap) == pytest.approx((0.0, 0.1), abs=1e-6)
    assert words(one) == ["kept", "not the policy's", "not the policy's", "kept"], "the ratio is 1"
    assert np.nan_to_num(one.weights, nan=-1).tolist() == [1, -1, -1, 1]
    assert one.damage == pytest.approx(math.expm1(0.1) - math.expm1(-0.1), rel=1e-5), "the mismatch alone"
    assert found["u_0_0"].reason == "largest weight" and one.reason == "largest gap" and found["u_2_0"].lost == 0
    assert math.isnan(found["u_2_0"].weights[0]), "no advantage, no weight"


def test_in_bypass_mode_the_worker_hands_them_over(queue, tmp_path):
    """Two micro-batches, whose log-probs are shifted by one, of prompts and responses."""
    made, batch = recorder(tmp_path, BYPASS, {"mismatch": {"keep_text": False}}), batch_of()
    monitor = made._trainer.monitor
    monitor.ask_the_worker(batch, 1, 0)
    assert queue[LOTS][-1].item() == -1, "padding"
    updates = []
    for rows in ([0, 1], [2]):
        fields = ("prompts", "responses", "response_mask", "advantages", "rollout_log_probs")
        some = {name: [queue[name][row] for row in rows] for name in fields}
        nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in some.items()}
        data = tu.get_tensordict({**nested, LOTS: torch.stack([queue[LOTS][row] for row in rows])}, {})
        whole = [torch.cat([torch.zeros(1), queue["old_log_probs"][row], torch.zeros(1)]) for row in rows]
        output = {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
        updates.append(measurement.measure(batch.extra_info[REQUEST], output, data))
    for update in updates:
        monitor.take_from_the_worker({f"actor/{key}": value.aggregate() for key, value in update.items()})
    found = kept_by(made, batch)
    assert set(found) == {"u_0_0", "u_1_0", "u_2_0"} and found["u_0_0"].texts is None
    assert words(found["u_0_0"]) == ["phantom-clipped", "kept"], "ln 1.28 is 0.247; the weights are the same"
    assert (found["u_0_0"].lost, found["u_0_0"].damage) == (1, pytest.approx(1 + math.expm1(0.3), rel=1e-5))
    assert found["u_0_0"].weights.tolist() == [0, 1]
    assert found["u_1_0"].log_probs.tobytes() == queue["old_log_probs"][1].numpy().tobytes()
    assert found["u_0_0"].estimator == "grpo, bypass mode"


def test_what_verl_rejects_and_weighs_is_seen(queue, tmp_path):
    correction = {"rollout_rs": "token_k2", "rollout_is": "vp_token_tis", "rollout_is_threshold": 1.2}
    made, batch = recorder(tmp_path, {"algorithm": {"rollout_correction": correction}}), batch_of()
    made._trainer.monitor.remember_mask(batch)
    queue["response_mask"] = [torch.tensor([1, 0]), *queue["response_mask"][1:]]
    ratios = [(pi - mu).exp() for pi, mu in zip(queue["old_log_probs"], queue["rollout_log_probs"], strict=True)]
    queue["rollout_is_weights"] = [ratio.clamp(max=1.2) for ratio in ratios]
    found = in_driver(made, batch)
    assert words(found["u_0_0"]) == ["truncated", "masked"] and found["u_0_0"].mask.tolist() == [1, 1]
    assert found["u_0_0"].weights.tolist() == pytest.approx([1.2, 0.0]) and found["u_0_0"].lost == 1
    assert found["u_0_0"].estimator == "grpo with token_tis"


def test_a_step_has_its_share_whatever_its_updates(queue, tmp_path):
    made, batch = recorder(tmp_path, {"mismatch": {"keep_tokens": 2}}), batch_of()
    for row in (0, 1, 2):
        one = SimpleNamespace(keys=[batch.keys[row]], tags=[batch.tags[row]], partition_id="train", extra_info={})
        made._trainer.monitor.measure_in_driver(one, 1)
    assert set(kept_by(made, batch)) == {"u_0_0", "u_1_0"}
    assert kept_by(made, batch, 2) == {}, "what was written is not written again"


def test_a_resume_goes_on_in_the_folder_and_a_response_says_how_old_its_weights_are(queue, tmp_path):
    made = recorder(tmp_path)
    for step in (1, 2, 3):
        in_driver(made, batch_of((step - 1,) * 3), step)
    resumed = recorder(tmp_path, step=2)
    assert [one.step for one in index_of(resumed.path)] == [1] * 3 + [2] * 3
    found = in_driver(resumed, batch_of((2, 1, 0)), 3)
    assert [(found[f"u_{row}_0"].version, found[f"u_{row}_0"].behind) for row in range(3)] == [(2, 0), (1, 1), (0, 2)]


def test_a_disk_that_is_full_costs_the_tokens_and_not_the_run(queue, tmp_path):
    made, batch = recorder(tmp_path), batch_of()
    made._trainer.monitor.measure_in_driver(batch, 1)
    made.path = tmp_path / "file" / "kept_tokens"
    (tmp_path / "file").touch()
    made._compute_metrics(lambda *args, **more: None, batch, {}, global_steps=1)
    made._trainer.monitor.add_metrics(metrics := {})
    assert metrics["mismatch/failed_measurements"] == 1


def test_without_the_setting_nothing_is_asked_or_written(queue):
    trainer, batch = trainer_of(BYPASS, {"mismatch": {"keep_tokens": 0}}), batch_of()
    trainer.monitor.ask_the_worker(batch, 1, 0)
    assert callbacks_asked_for(trainer.config) == [] and LOTS not in queue and batch.extra_info[REQUEST]["keep"] == 0
    assert CANDIDATES not in measurement.measure(batch.extra_info[REQUEST], {"log_probs": torch.zeros(1)}, {})


def test_without_a_metrics_file_it_stands_among_the_checkpoints(tmp_path):
    made = recorder(tmp_path, {"trainer": {"logger": ["console"], "default_local_dir": str(tmp_path / "run")}})
    assert made.path == tmp_path / "run" / "kept_tokens"
    assert callbacks_asked_for(made._trainer.config) == [TokenRecorder]
