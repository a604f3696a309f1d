"""vLLM in the test process."""

import gc
from collections.abc import Iterator

import pytest
import verl  # noqa: F401 - loads the plugin
from verl.plugin.platform import set_platform

from verl_precision.integration.cpu.platform import PlatformCPU


@pytest.fixture(scope="module")
def vllm_process(tmp_path_factory) -> Iterator[None]:
    """Make this process a vLLM worker of one: CPU platform, world of size 1.

    An engine that is collected as garbage, at whatever moment, destroys the process groups, which other engines of this
    process are using. Here they are the fixture's, which destroys them when all engines have gone. (An engine freezes
    the collector's objects, itself among them.)
    """
    set_platform(PlatformCPU())
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    # The models of a process share rotary embeddings. A test whose reload never ends leaves them without their values,
    # and the next module's engines would compute with that.
    rotary_embedding._ROPE_DICT.clear()
    rendezvous = tmp_path_factory.mktemp("vllm") / "rendezvous"
    with set_current_vllm_config(VllmConfig()), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        distributed.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend="gloo")
        distributed.initialize_model_parallel(1, 1)
        yield
        gc.unfreeze()
        gc.collect()
        distributed.cleanup_dist_env_and_memory()
        gc.freeze()  # as after the collection of tests: other files run in this process
