"""Two runs on one host, each with a Ray of its own, have different weight sockets, at both ends the same."""

import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from verl_precision.integration import weight_socket

EXTENSION = "verl_precision.integration.weight_sync_worker.VerifiedWeightSyncExtension"
CLUSTER = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir={folder!r})
context = ray.get_runtime_context()
print("names", context.get_job_id(), context.gcs_address)
input()
"""


def ends(job: str, extension: str | None, disaggregated: bool = False, gcs: str = "10.0.0.1:6001") -> tuple[str, str]:
    """Return the paths that trainer and rollout would use."""
    config = SimpleNamespace(
        engine_kwargs={"vllm": {"worker_extension_cls": extension}},
        disaggregation=SimpleNamespace(enabled=disaggregated),
    )
    context = SimpleNamespace(get_job_id=lambda: job, gcs_address=gcs)
    sender = SimpleNamespace(config=config, zmq_handle=None)
    path = "ipc:///tmp/rl-colocate-zmq-{}-replica-0-rank-0.sock"

    def init_sender():
        sender.zmq_handle = path.format(job)

    def init_receiver():
        os.environ["VERL_RAY_JOB_ID"] = job

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.get_runtime_context", lambda: context)
        patch.setenv("VERL_RAY_JOB_ID", "")
        weight_socket._rename_socket(init_sender, sender, (), {})
        weight_socket._rename_job(init_receiver, SimpleNamespace(config=config), (), {})
        return sender.zmq_handle, path.format(os.environ["VERL_RAY_JOB_ID"])


def test_both_ends_have_one_name_that_another_cluster_has_not():
    sender, receiver = ends("01000000", EXTENSION)
    assert sender == receiver == "ipc:///tmp/rl-colocate-zmq-01000000-6001-replica-0-rank-0.sock"
    assert ends("01000000", EXTENSION, gcs="10.0.0.1:6002")[0] != sender


@pytest.mark.parametrize(("extension", "disaggregated"), [(None, False), ("verl.Theirs", False), (EXTENSION, True)])
def test_other_runs_keep_verls_name(extension, disaggregated):
    sender, receiver = ends("01000000", extension, disaggregated)
    assert sender == receiver == "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


def test_two_clusters_of_one_host_give_their_first_job_one_name():
    """Upstream's defect: verl takes the job's name for unique."""
    found, processes = [], []
    with tempfile.TemporaryDirectory(prefix="vp-") as first, tempfile.TemporaryDirectory(prefix="vp-") as second:
        for folder in (first, second):
            environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
            command = [sys.executable, "-c", CLUSTER.format(folder=folder)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        for process in processes:
            line = next(line for line in process.stdout if line.startswith("names"))
            found.append(re.fullmatch(r"names (\w+) \S+:(\d+)\n", line).groups())
        for process in processes:
            process.communicate("\n", timeout=60)
    (job, port), (other_job, other_port) = found
    assert job == other_job and port != other_port
