"""verl's process group on a CPU: refused upstream, one gloo backend with us, untouched elsewhere."""

import pytest

SCRIPT = """
import os, socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
import torch, verl
from verl.utils import distributed
from verl.plugin.platform import set_platform
{platform}
distributed.initialize_global_process_group_ray()
t = torch.ones(2); torch.distributed.all_reduce(t); print(torch.distributed.get_backend(), t.tolist())
torch.distributed.destroy_process_group()
"""
OURS = "from verl_precision.integration.cpu.platform import PlatformCPU; set_platform(PlatformCPU())"
UPSTREAM = OURS + "\ndistributed.initialize_global_process_group_ray = "
UPSTREAM += "distributed.initialize_global_process_group_ray.__wrapped__"


def test_one_backend_on_cpu(run_python):
    done = run_python(SCRIPT.format(platform=OURS))
    assert done.returncode == 0, done.stderr
    assert "gloo [1.0, 1.0]" in done.stdout


def test_upstream_fails_on_cpu(run_python):
    """The defect the patch is for; when this passes, the ledger entry can go."""
    done = run_python(SCRIPT.format(platform=UPSTREAM))
    assert done.returncode != 0 and "uplicate" in done.stderr, done.stderr


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_other_devices_pass_through_unchanged(monkeypatch, device):
    from verl_precision.integration.cpu.process_group import _with_single_backend

    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: device)
    seen = []
    _with_single_backend(lambda **kwargs: seen.append(kwargs), None, (30,), {})
    _with_single_backend(lambda **kwargs: seen.append(kwargs), None, (), {"timeout_second": 5, "backend": "nccl"})
    assert seen == [{"timeout_second": 30, "backend": None}, {"timeout_second": 5, "backend": "nccl"}]
