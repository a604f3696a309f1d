"""The one-file loop learns in both precisions, shows their gap, and stops at a weight that arrives changed."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import one_loop  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_it_learns_and_fp16_has_the_smaller_gap():
    runs = {dtype: one_loop.train(dtype, 60) for dtype in ("bf16", "fp16")}
    for rows in runs.values():
        assert rows[0]["reward"] < 0.2 and rows[-1]["reward"] > 0.8
    bf16, fp16 = (sum(row["k3"] for row in runs[dtype]) for dtype in ("bf16", "fp16"))
    assert bf16 > 20 * fp16 > 0


def test_a_stale_head_ends_the_run_at_the_canary(monkeypatch):
    """The digests see the wire only; the canary sees that the head in use is the first one."""

    class Stale(one_loop.Rollout):
        def load(self, stream):
            head = self.weights.get("head")
            super().load(stream)
            self.weights["head"] = self.weights["head"] if head is None else head

    monkeypatch.setattr(one_loop, "Rollout", Stale)
    with pytest.raises(RuntimeError, match="served log-probs differ"):
        one_loop.train("fp16", 40)
