"""On a GPU, the checks of `verl-precision selftest`, one test each."""

import pytest
import torch
from rich.console import Console

from verl_precision.tools.selftest.session import CHECKS, run_selftest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", [*CHECKS])
def test_check_passes(name, tmp_path):
    (outcome,) = run_selftest(tmp_path, "cuda", [name], Console())
    assert outcome.status == "passed", outcome.message
