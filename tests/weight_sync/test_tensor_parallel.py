"""The guard as it runs on an accelerator, in two ranks that hold half a model each."""

import os
import traceback
from pathlib import Path

import forked
import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from test_accelerator import AcceleratorPair, assert_takes, like_an_accelerator
from verl.plugin.platform import set_platform
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from verl_precision.integration.cpu.platform import PlatformCPU


def one_of_two(rank: int, folder: str) -> None:
    set_platform(PlatformCPU())
    torch.set_num_threads(1)
    try:
        with set_current_vllm_config(VllmConfig()), pytest.MonkeyPatch.context() as patch:
            like_an_accelerator(patch)
            init_distributed_environment(2, rank, f"file://{folder}/rendezvous", rank, backend="gloo")
            initialize_model_parallel(2, 1)
            for architecture in ("qwen3_tied", "qwen3_moe"):
                pair = AcceleratorPair(architecture, tensor_parallel_size=2)
                part, whole = (one.model.layers[0].self_attn.o_proj.weight for one in (pair.model, pair.trainer))
                assert part.shape[1] * 2 == whole.shape[1]
                assert_takes(pair, syncs=2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_syncs_take_with_tensor_parallel_2(tmp_path):
    """In new processes: one that is forked from this hangs where this one's threads hold torch's locks."""
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script = f"import sys\nsys.path += {folders!r}\nfrom test_tensor_parallel import one_of_two\none_of_two("
    ident = f"vp{os.getpid()}"
    forked.ranks(2, lambda rank: f"{script}{rank}, {str(tmp_path)!r})", tmp_path, VLLM_DIST_IDENT=ident)
