"""What is measured of a batch whose advantages are known; the trainer against itself with a real engine."""

import math
from types import SimpleNamespace

import pytest
import torch
from monitored import trainer_of
from verl.utils import tensordict_utils as tu

from verl_precision.engine.arithmetic_choice import VARIABLE
from verl_precision.integration.trainer import batch_checks
from verl_precision.integration.trainer.batch_checks import PER_RANK, BatchChecks, SelfGap
from verl_precision.mismatch import metric_names as names
from verl_precision.tools.engines.fsdp_scorer import engine_batch, nested

# Key -> reward, advantage, response. The second session returns two outputs, of which the last one counts.
ROWS = {"a_0_0": (1.0, 0.0, [5, 6]), "a_1_1": (1.0, 0.0, [5, 6]), "a_1_0": (7.0, 3.0, [9])}
ROWS |= {"b_0_0": (0.0, -1.0, [5, 6, 7, 8]), "b_1_0": (1.0, 1.0, [5]), "padding_0_0": (5.0, 1.0, [5])}
SIGNAL = ("equal_reward_groups", 0.5), ("zero_advantage_responses", 0.5), ("distinct_responses", 0.75)
SIGNAL = {f"signal/{name}": share for name, share in (*SIGNAL, ("truncated_fraction", 0.25))}


class Workers:
    """verl's actor workers around an engine; a fault adds to the log-probs of what is scored alone."""

    def __init__(self, engine, world_size=1, fault=0.0):
        self.engine, self.world_size, self.fault, self.asked = engine, world_size, fault, []

    def compute_log_prob(self, data):
        """Score as verl's worker does, which packs as configured where nothing else is asked for."""
        sizes = {key: tu.get(data, key) for key in ("use_dynamic_bsz", "micro_batch_size_per_gpu") if key in data}
        self.asked.append(tuple(sizes.values()))
        asked = {"use_remove_padding": True, "max_token_len_per_gpu": 64, **sizes}
        with self.engine.eval_mode():
            found = self.engine.infer_batch(engine_batch(list(data["input_ids"].unbind()), **asked))["model_output"]
        return tu.get_tensordict({"log_probs": found["log_probs"] + self.fault * (self.asked[-1] == (False, 1))})


@pytest.fixture
def measured(monkeypatch):
    """Return a function that measures these rows at a step, and returns the metrics."""

    def get(keys, partition_id, select_fields=None):
        rewards, advantages, responses = zip(*(ROWS[key] for key in keys), strict=True)
        ones = [torch.ones(len(tokens)) for tokens in responses]
        rows = {"response_mask": ones, "rollout_log_probs": ones, "responses": [*map(torch.tensor, responses)]}
        rows["rm_scores"] = [one * reward / len(one) for one, reward in zip(ones, rewards, strict=True)]
        rows["advantages"] = [one * advantage for one, advantage in zip(ones, advantages, strict=True)]
        rows["input_ids"] = [torch.tensor([11, 12, 13, *tokens]) for tokens in responses]
        data = tu.get_tensordict({**{name: nested(row) for name, row in rows.items()}, "text": keys})
        return data.select(*select_fields) if select_fields else data

    def measured(workers, step, *changes, dynamic=True, size=None):
        rollout = {"log_prob_use_dynamic_bsz": dynamic, "log_prob_micro_batch_size_per_gpu": size, "temperature": 1.0}
        config = *changes, {"actor_rollout_ref": {"rollout": rollout}}
        trainer = trainer_of(*config, global_steps=step, actor_rollout_wg=workers)
        tags = [{"is_padding": key.startswith("padding"), "response_len": len(row[2])} for key, row in ROWS.items()]
        batch = SimpleNamespace(keys=list(ROWS), tags=tags, partition_id="train")
        assert BatchChecks(trainer)._compute_advantage(lambda batch, metrics: batch, batch, {}) is batch
        trainer.monitor.add_metrics(metrics := {})
        return metrics

    monkeypatch.setattr("transfer_queue.kv_batch_get", get)
    monkeypatch.setattr(batch_checks, "FEWEST_TOKENS", 9)
    return measured


@pytest.mark.parametrize("bypass", [False, True])
def test_the_signal_is_that_of_the_sessions_and_a_failure_beside_it_is_counted(measured, bypass):
    mode = {"algorithm": {"rollout_correction": {"bypass_mode": bypass}}}
    assert measured(None, 3, mode) == SIGNAL | {"mismatch/failed_measurements": 0}
    assert measured(None, 2, mode) == SIGNAL | {"mismatch/failed_measurements": 1}, "there are no workers"


def test_rounding_gives_a_gap_less_in_fp32_and_none_in_exact_arithmetic(make_engine, measured, monkeypatch):
    bf16, fp32 = (measured(Workers(make_engine(dtype)), 1)[names.SELF_GAP] for dtype in ("bf16", "fp32"))
    assert 0 < bf16 < 0.02 and fp32 < bf16 / 100
    monkeypatch.setenv(VARIABLE, "exact")
    metrics = measured(Workers(make_engine("bf16")), 1)
    assert metrics[names.SELF_GAP] == metrics[names.SELF_GAP_RATIO] == metrics["mismatch/self_gap_k3"] == 0


def test_a_packing_that_changes_log_probs_is_seen_in_the_steps_asked_for(make_engine, measured, monkeypatch):
    workers, often = Workers(make_engine("fp32"), fault=-0.5), {"mismatch": {"self_gap_every_n_steps": 4}}
    found = {step: measured(workers, step, often).get(names.SELF_GAP) for step in range(1, 6)}
    assert found == {step: pytest.approx(0.5, rel=1e-3) if step in (1, 2, 4) else None for step in found}
    for size, together in ((None, 1), (1, 1), (3, 2), (16, 4)):
        measured(workers, 1, dynamic=False, size=size)
        assert workers.asked[-2:] == [(False, together), (False, 1)], "as the run packs"
    few = Workers(None, world_size=2)
    assert len(ROWS) < 2 * PER_RANK and names.SELF_GAP not in measured(few, 1) and few.asked == [], "for all ranks"
    monkeypatch.setattr(batch_checks, "FEWEST_TOKENS", 10)
    assert names.SELF_GAP not in measured(few := Workers(None), 1) and few.asked == [], "they have nine"


def test_the_gap_beside_the_gap_to_the_rollout_by_hand():
    """Gaps of 0.2, 0 and 0.1 nats beside 0.1, 0.3 and 0.2 to the rollout; one token is masked, one is not finite."""
    tokens = [[-1.2, -2.0, -0.9, -9.0, -1.0], [-1.0, -2.0, -1.0, -1.0, -1.0], [-1.1, -1.7, -1.2, -1.0, math.nan]]
    metrics = SelfGap.of_tokens(*torch.tensor(tokens), mask_N=torch.tensor([1, 1, 1, 0, 1])).metrics()
    k3 = (math.exp(-0.2) - 0.8 + math.exp(0.1) - 1.1) / 3
    assert [*metrics.values()] == [pytest.approx(each, rel=1e-5) for each in (0.1, k3, 0.5)]
    same = torch.full((4,), -1.0)
    floor = SelfGap.of_tokens(same + 3e-5, same, same, mask_N=torch.ones(4)).metrics()
    assert floor[names.SELF_GAP_RATIO] == pytest.approx(3, rel=0.01), "a gap to the rollout of 0 counts as 1e-5"
    for alone, usual in ((0.001, 0.05), (0.05, 0.001)):
        metrics = SelfGap.of_tokens(same + alone, same + usual, same, mask_N=torch.ones(4)).metrics()
        assert metrics[names.SELF_GAP_RATIO] == pytest.approx(49, rel=0.01), "whichever packing is broken"
