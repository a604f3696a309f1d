"""Two runs on one host, each with a Ray of its own, have different weight sockets, at both ends the same."""

from types import SimpleNamespace

import pytest
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_precision.base.owner import RUN_MARK
from verl_precision.integration.rollout import weight_socket
from verl_precision.integration.rollout.weight_sync_worker import VerifiedWeightSyncExtension

EXTENSION = "verl_precision.integration.rollout.weight_sync_worker.VerifiedWeightSyncExtension"


@pytest.fixture(autouse=True)
def first_job_of_a_cluster(monkeypatch):
    """Every Ray cluster calls its first job so."""
    job = "01000000"
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: job))
    variables = {"VERL_RAY_JOB_ID": job, "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", weight_socket.VARIABLE: ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def sender(extension: str | None) -> str:
    """Return the trainer's path, from verl's own class."""
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size", "n_gpus_per_node")
    engine_kwargs = {"vllm": {"worker_extension_cls": extension}}
    others = {"layered_summon": False, "disaggregation": None, "engine_kwargs": engine_kwargs}
    config = SimpleNamespace(**dict.fromkeys(sizes, 1), **others, get=lambda key, default=None: default)
    return vllm_rollout.ServerAdapter(config, None, None, replica_rank=0).zmq_handle


def receiver(extension: type) -> str:
    """Return the rollout's path, from the extension that runs in vLLM's worker."""
    worker = object.__new__(extension)
    worker.model_runner, worker.local_rank = SimpleNamespace(vllm_config=None), 0
    return worker._get_zmq_handle()


def test_both_ends_of_a_run_have_one_path_and_another_run_has_another(monkeypatch):
    """verl's, which two clusters share, is that of other extensions, and of a Ray that was there before."""
    assert sender(EXTENSION) == sender(None) == receiver(VerifiedWeightSyncExtension)
    weight_socket.choose_name()
    first = sender(EXTENSION)
    assert first == receiver(VerifiedWeightSyncExtension) != sender(None)
    assert sender(None) == sender("verl.Theirs") == receiver(vLLMColocateWorkerExtension)
    weight_socket.choose_name()
    assert first != sender(EXTENSION) == receiver(VerifiedWeightSyncExtension)
    assert len(first) < 107  # the longest path of a UNIX socket
    monkeypatch.setenv(RUN_MARK, "0123456789abcdef")  # of a comparison's run: the same at each start
    weight_socket.choose_name()
    assert "/rl-colocate-zmq-0123456789ab-" in sender(EXTENSION)
