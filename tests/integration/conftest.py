"""Real engines in one process."""

import functools

import pytest
import torch
import verl_engines
from verl.plugin.platform import get_platform, set_platform

from verl_precision.engine.settings import LossScaleSettings
from verl_precision.integration.cpu.platform import PlatformCPU
from verl_precision.tools.engines.fsdp_scorer import make_group_of_one


@pytest.fixture(scope="module")
def make_engine():
    """Return a function that makes engines in a process group of one."""
    before = get_platform()
    set_platform(PlatformCPU())
    make_group_of_one("cpu")
    scaling = LossScaleSettings(initial=1024.0)
    yield functools.partial(verl_engines.make_engine, packed=True, rate=1e-3, loss_scale=scaling)
    torch.distributed.destroy_process_group()
    set_platform(before)
