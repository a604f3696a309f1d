"""vLLM in the test process."""

import socket
from collections.abc import Iterator

import pytest
import verl  # noqa: F401 - loads the plugin
from verl.plugin.platform import set_platform

from verl_precision.platforms.cpu import PlatformCPU


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[None]:
    """Make this process a vLLM worker of one: CPU platform, world of size 1."""
    set_platform(PlatformCPU())
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()
