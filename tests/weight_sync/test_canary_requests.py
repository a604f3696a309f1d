"""The canary's requests to real Ray actors: replicas that answer, hang, die, or have no log-probs to give.

The actors stand in for verl's servers, whose contract is `generate`; the real ones are asked in tests/e2e.
"""

import functools
import logging
import tempfile
from types import SimpleNamespace

import pytest
import ray
import torch
from composer import compose_recipe
from omegaconf import OmegaConf
from ray_server import LOG_PROB, Server
from transformers import AutoTokenizer
from verl.utils import tensordict_utils as tu

from verl_precision.base.errors import WeightSyncError
from verl_precision.engine.shadow import ROUNDED_TO
from verl_precision.integration.trainer.canary_requests import TrainerCanary
from verl_precision.tools.tiny_model import cached_tiny_model


class Workers:
    """The trainer's side: every log-prob is `value`, or it cannot score."""

    def __init__(self, value: float = LOG_PROB, world_size: int = 3, error: Exception | None = None) -> None:
        self.value, self.world_size, self.error, self.rows, self.rounded_to = value, world_size, error, 0, []

    def compute_log_prob(self, data):
        if self.error:
            raise self.error
        self.rounded_to.append(tu.get_non_tensor_data(data, ROUNDED_TO, None))
        self.rows = len(data)
        assert self.rows % self.world_size == 0, "verl splits a batch evenly over its ranks"
        rows_of_a_rank = self.rows // self.world_size
        assert tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None) == rows_of_a_rank, "one forward a rank"
        values = torch.full_like(data["input_ids"].values(), self.value, dtype=torch.float32)
        log_probs = torch.nested.nested_tensor_from_jagged(values, data["input_ids"].offsets())
        return tu.get_tensordict({"log_probs": log_probs})


@pytest.fixture(scope="module", autouse=True)
def private_ray():
    with tempfile.TemporaryDirectory(prefix="vp-ray-", ignore_cleanup_errors=True) as folder:
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()


@functools.cache
def _tokenizer():
    return AutoTokenizer.from_pretrained(cached_tiny_model("qwen3"))


def canary(*overrides: str, precision: str = "fp16", **settings) -> TrainerCanary:
    config = compose_recipe("recipes/quickstart/quickstart.yaml", f"precision={precision}", *overrides)
    OmegaConf.update(config, "weight_sync.canary", settings, merge=False)
    return TrainerCanary(SimpleNamespace(config=config))


def _replica(rank: int, behaviour: str) -> SimpleNamespace:
    return SimpleNamespace(replica_rank=rank, server_handle=Server.remote(behaviour))


@pytest.fixture(scope="module")
def healthy() -> list[SimpleNamespace]:
    """Two replicas that survive a test, so that each starts once."""
    return [_replica(rank, "answers") for rank in range(2)]


def _one_sync(canary, replicas, workers=None) -> dict[str, float]:
    canary.ask(replicas, _tokenizer())
    canary.collect()
    return canary.judge(workers or Workers())


@pytest.mark.parametrize(("sequences", "ranks", "rows"), [(2, 1, 2), (2, 3, 3), (4, 3, 6)])
def test_healthy_replicas_and_each_rank_scores_its_rows_in_one_forward(healthy, sequences, ranks, rows):
    workers = Workers(world_size=ranks)
    metrics = _one_sync(canary(sequences=sequences), healthy, workers)
    assert metrics["weight_sync/canary_gap"] == 0.0 < metrics["weight_sync/canary_bound"]
    assert metrics["weight_sync/seconds"] > 0
    assert workers.rows == rows, "sequences are repeated until each rank has as many"


@pytest.mark.parametrize("off_by", [0.0, 2.0])
def test_replicas_that_serve_an_adapter_continue_the_first_half(off_by):
    """Each of two replicas continues two sequences, and the trainer scores all four."""
    adapted, workers = canary("actor_rollout_ref.model.lora_rank=8", action="log"), Workers(LOG_PROB + off_by, 1)
    metrics = _one_sync(adapted, [_replica(rank, "continues") for rank in range(2)], workers)
    assert metrics["weight_sync/canary_gap"] == off_by and workers.rows == 4


@pytest.mark.parametrize(("precision", "dtype", "overrides"), [
    ("fp32_train_bf16_rollout", "bfloat16", ()),
    ("fp16_train_bf16_rollout", "bfloat16", ()),
    ("bf16_train_fp16_rollout", None, ()),  # both have the same rounded weights
    ("fp32_train_bf16_rollout", None, ("actor_rollout_ref.model.lora_rank=8",)),
])  # fmt: skip
def test_the_trainer_scores_with_weights_as_coarse_as_the_rollouts(precision, dtype, overrides, healthy):
    """A trainer whose weights drift from a BF16 rollout by less than it can see is no wrong sync."""
    replicas, workers = [_replica(0, "continues")] if overrides else healthy[:1], Workers(world_size=1)
    _one_sync(canary(*overrides, precision=precision), replicas, workers)
    assert workers.rounded_to == [dtype]


@pytest.mark.parametrize(("overrides", "eps"), [
    ([], 2**-10),
    (["rollout.quantization=fp8"], 2**-3),
    (["+rollout.engine_kwargs.vllm.kv_cache_dtype=fp8_e5m2"], 2**-2),
    (["+rollout.engine_kwargs.vllm.kv_cache_dtype=bfloat16"], 2**-10),
])  # fmt: skip
def test_the_bound_is_of_the_coarsest_grid_of_the_rollout(overrides, eps, healthy):
    """Mean |log π| is -LOG_PROB, so the bound is min(16 ε, max(0.15, ε)) · (1 - LOG_PROB)."""
    overrides = [text.replace("rollout.", "actor_rollout_ref.rollout.", 1) for text in overrides]
    metrics = _one_sync(canary(*overrides), healthy[:1])
    bound = min(16 * eps, max(0.15, eps)) * (1 - LOG_PROB)
    assert metrics["weight_sync/canary_bound"] == pytest.approx(bound)


def test_only_every_nth_sync_is_asked(healthy):
    every_second = canary(every_n_syncs=2)
    assert [bool(_one_sync(every_second, healthy)) for _ in range(4)] == [True, False, True, False]
    assert _one_sync(canary(every_n_syncs=0), healthy) == {}


def test_a_replica_with_other_log_probs_ends_the_run_or_with_action_log_only_says_so(healthy, caplog):
    with pytest.raises(WeightSyncError, match=r"Canary of weight sync 0: replica 0: .* differ .* by 2 nats"):
        _one_sync(canary(), healthy[:1], Workers(LOG_PROB + 2))
    assert _one_sync(canary(action="log"), healthy[:1], Workers(LOG_PROB + 2))["weight_sync/canary_gap"] == 2.0
    assert "Canary of weight sync 0: replica 0" in caplog.text


def test_a_prefix_cache_that_outlives_a_sync_is_named(healthy):
    one, replicas = canary(), [healthy[0], _replica(1, "keeps its cache")]
    _one_sync(one, replicas)
    with pytest.raises(WeightSyncError, match="replica 1: it read 16 tokens from a prefix cache from older"):
        _one_sync(one, replicas)


@pytest.mark.parametrize(("behaviour", "message"), [
    ("hangs", r"replica 1 did not answer within weight_sync\.canary\.timeout_seconds=0\.5"),
    ("dies", "replica 1 failed to answer"),
    ("raises", "replica 1 failed to answer: .*engine core is dead"),
])  # fmt: skip
def test_a_replica_that_does_not_answer_is_named_and_nothing_hangs(healthy, behaviour, message):
    replicas = [healthy[0], _replica(1, behaviour)]
    ray.get([replica.server_handle.__ray_ready__.remote() for replica in replicas])
    with pytest.raises(WeightSyncError, match=message):
        _one_sync(canary(timeout_seconds=0.5 if behaviour == "hangs" else 120.0), replicas)


@pytest.mark.parametrize(("behaviour", "workers", "why"), [
    ("has none", Workers(), "replica 0 returned no log-probs"),
    ("answers", Workers(error=RuntimeError("no engine")), "the trainer could not score it (RuntimeError: no engine)"),
])  # fmt: skip
def test_a_canary_that_cannot_work_is_off_says_so_once_and_the_run_goes_on(caplog, behaviour, workers, why):
    blind, replicas = canary(), [_replica(0, behaviour)]
    with caplog.at_level(logging.WARNING, logger="verl_precision.weight_sync"):
        assert [_one_sync(blind, replicas, workers) for _ in range(3)] == [{}, {}, {}]
    assert caplog.text.count(f"is off for the rest of this run: {why}") == 1
