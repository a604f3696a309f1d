"""The canary's rim over real Ray actors: replicas that answer, hang, die, or have no log-probs to give.

The actors stand in for verl's servers, whose contract is `generate`; the real ones are asked in tests/e2e.
"""

import logging
import tempfile
from types import SimpleNamespace

import pytest
import ray
import torch
from ray_server import LOG_PROB, Server
from transformers import AutoTokenizer
from verl.utils import tensordict_utils as tu

from verl_precision.errors import WeightSyncError
from verl_precision.integration.canary_requests import TrainerCanary
from verl_precision.tiny_model import cached_tiny_model
from verl_precision.weight_sync.settings import CanarySettings


class Workers:
    """The trainer's side: every log-prob is `value`."""

    def __init__(self, value: float = LOG_PROB, world_size: int = 3) -> None:
        self.value, self.world_size, self.rows = value, world_size, 0

    def compute_log_prob(self, data):
        self.rows = len(data)
        assert self.rows % self.world_size == 0, "verl splits a batch evenly over its ranks"
        rows_of_a_rank = self.rows // self.world_size
        assert tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None) == rows_of_a_rank, "one forward a rank"
        values = torch.full_like(data["input_ids"].values(), self.value, dtype=torch.float32)
        return tu.get_tensordict(
            {"log_probs": torch.nested.nested_tensor_from_jagged(values, data["input_ids"].offsets())}
        )


@pytest.fixture(scope="module", autouse=True)
def private_ray():
    with tempfile.TemporaryDirectory(prefix="vp-ray-", ignore_cleanup_errors=True) as folder:
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(cached_tiny_model("qwen3"))


@pytest.fixture
def canary(compose_recipe):
    config = compose_recipe("recipes/quickstart/quickstart.yaml", "precision=fp16")

    def build(**settings) -> TrainerCanary:
        return TrainerCanary(config, CanarySettings(**{"timeout_seconds": 120, **settings}))

    return build


@pytest.fixture(scope="module")
def servers():
    """Servers that survive a test, so that each starts once."""
    return [Server.remote("answers") for _ in range(2)]


@pytest.fixture
def healthy(servers) -> list[SimpleNamespace]:
    return [SimpleNamespace(replica_rank=rank, server_handle=server) for rank, server in enumerate(servers)]


def _replica(rank: int, behaviour: str) -> SimpleNamespace:
    return SimpleNamespace(replica_rank=rank, server_handle=Server.remote(behaviour))


def _one_sync(canary, replicas, tokenizer, workers=None) -> dict[str, float]:
    canary.ask(replicas, tokenizer)
    canary.collect()
    return canary.judge(workers or Workers())


def test_healthy_replicas(canary, tokenizer, healthy):
    workers = Workers()
    metrics = _one_sync(canary(sequences=2), healthy, tokenizer, workers)
    assert metrics["weight_sync/canary_gap"] == 0.0 < metrics["weight_sync/canary_bound"]
    assert metrics["weight_sync/seconds"] > 0
    assert workers.rows == 3, "two sequences, repeated until each of three ranks has one"


@pytest.mark.parametrize(("sequences", "ranks", "rows"), [(2, 1, 2), (2, 2, 2), (4, 3, 6), (1, 4, 4)])
def test_each_rank_scores_its_rows_in_one_forward(canary, tokenizer, healthy, sequences, ranks, rows):
    workers = Workers(world_size=ranks)
    assert _one_sync(canary(sequences=sequences), healthy[:1], tokenizer, workers)["weight_sync/canary_gap"] == 0.0
    assert workers.rows == rows


def test_only_every_nth_sync_is_asked(canary, tokenizer, healthy):
    every_second = canary(every_n_syncs=2)
    found = [bool(_one_sync(every_second, healthy, tokenizer)) for _ in range(4)]
    assert found == [True, False, True, False]
    assert _one_sync(canary(every_n_syncs=0), healthy, tokenizer) == {}


def test_a_replica_with_other_log_probs_ends_the_run(canary, tokenizer, healthy):
    with pytest.raises(WeightSyncError, match=r"Canary of weight sync 0: replica 0: .* differ .* by 2 nats"):
        _one_sync(canary(), healthy[:1], tokenizer, Workers(LOG_PROB + 2))


def test_action_log_only_says_so(canary, tokenizer, healthy, caplog):
    with caplog.at_level(logging.ERROR, logger="verl_precision.weight_sync"):
        metrics = _one_sync(canary(action="log"), healthy[:1], tokenizer, Workers(LOG_PROB + 2))
    assert metrics["weight_sync/canary_gap"] == 2.0
    assert "Canary of weight sync 0: replica 0" in caplog.text


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("hangs", r"replica 1 has not answered within weight_sync\.canary\.timeout_seconds=0\.5"),
        ("dies", "replica 1 failed to answer"),
        ("raises", "replica 1 failed to answer: .*engine core is dead"),
    ],
)
def test_a_replica_that_does_not_answer_is_named_and_nothing_hangs(canary, tokenizer, healthy, behaviour, message):
    replicas = [healthy[0], _replica(1, behaviour)]
    ray.get([replica.server_handle.__ray_ready__.remote() for replica in replicas])
    patience = 0.5 if behaviour == "hangs" else 120
    with pytest.raises(WeightSyncError, match=message):
        _one_sync(canary(timeout_seconds=patience), replicas, tokenizer)


def test_an_engine_without_prompt_log_probs_has_no_canary_and_says_so_once(canary, tokenizer, caplog):
    blind = canary()
    replicas = [_replica(0, "has none")]
    with caplog.at_level(logging.WARNING, logger="verl_precision.weight_sync"):
        assert [_one_sync(blind, replicas, tokenizer) for _ in range(3)] == [{}, {}, {}]
    assert caplog.text.count("is off for the rest of this run: replica 0 returns no log-probs") == 1


def test_a_trainer_that_cannot_score_ends_the_canary_and_not_the_run(canary, tokenizer, healthy, caplog):
    class Broken(Workers):
        def compute_log_prob(self, data):
            raise RuntimeError("no such engine")

    with caplog.at_level(logging.WARNING, logger="verl_precision.weight_sync"):
        assert _one_sync(canary(), healthy[:1], tokenizer, Broken()) == {}
    assert "the trainer could not score it (RuntimeError: no such engine)" in caplog.text
