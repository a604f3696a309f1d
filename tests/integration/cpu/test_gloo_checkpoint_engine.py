"""Two processes over gloo: every bit arrives, damage is named, and a lost process ends the sync with an error."""

import asyncio
import math
import os

import pytest
import torch
from torch import multiprocessing
from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks

from verl_precision.base.errors import WeightSyncError
from verl_precision.integration.cpu.gloo_checkpoint_engine import GlooCheckpointEngine
from verl_precision.integration.rollout.load_recorder import Sync
from verl_precision.weight_sync.manifest import MANIFEST_NAME, bit_view, differences, send_with_manifest

BUCKET = 1000  # bytes
_RANDOM = torch.Generator().manual_seed(0)  # each process has the same numbers
WEIGHTS = {
    "larger.than.a.bucket": torch.randn(3, 500, generator=_RANDOM),
    "odd": torch.randn(7, generator=_RANDOM).bfloat16(),
    "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    "transposed": torch.randn(5, 3, generator=_RANDOM).half().t(),
    "nan": torch.tensor([math.nan, -0.0, math.inf]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "a.whole.bucket": torch.randn(BUCKET // 4, generator=_RANDOM),
}
SYNCS = ("first", "flipped", "again", "lost")


def stream(sync: str):
    """What the trainer sends: in one sync with a bit flipped on the way, in the last one it dies before the end."""
    for name, tensor in send_with_manifest(iter(WEIGHTS.items())):
        if sync == "lost" and name == "scalar":
            os._exit(0)
        if sync == "flipped" and name == "odd":
            tensor = tensor.clone()
            tensor.view(torch.int16)[3] ^= 1
        yield name, tensor


async def taken(weights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in weights}


def end_of_the_road(rank: int, addresses, folder) -> None:
    """One process: the trainer (rank 0) or the rollout, which writes down what it gets."""
    engine = GlooCheckpointEngine(BUCKET, is_master=rank == 0)
    for sync in SYNCS:
        address = engine.prepare()
        address = addresses.get(timeout=120) if rank else addresses.put(address) or address
        sides = GlooCheckpointEngine.build_topology(1, 1, [address, None])
        engine.init_process_group(**{name: value for name, (value,) in sides[rank].items()})
        assert not torch.distributed.is_initialized(), "the default group is somebody else's"
        try:
            if rank == 0:
                asyncio.run(engine.send_weights(stream(sync)))
            else:
                torch.save(asyncio.run(taken(engine.receive_weights())), folder / sync)
        except WeightSyncError as error:
            (folder / f"{sync}.txt").write_text(str(error))
        engine.finalize()


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    folder, spawn = tmp_path_factory.mktemp("rollout"), multiprocessing.get_context("spawn")
    addresses = spawn.Queue()
    ends = [spawn.Process(target=end_of_the_road, args=(rank, addresses, folder), daemon=True) for rank in range(2)]
    for step in ("start", "join"):
        for end in ends:
            getattr(end, step)()
    assert [end.exitcode for end in ends] == [0, 0]
    return folder


def damage(tensors: dict[str, torch.Tensor]) -> list[str]:
    sync = Sync(on_cpu=True, peft_config=None)
    sync.take_bucket(list(tensors.items()))
    return differences(sync.sent, sync.digests.fetch())


@pytest.mark.parametrize("sync", ["first", "again"])
def test_names_dtypes_shapes_and_every_bit_arrive(rollout, sync):
    sent, arrived = dict(stream(sync)), torch.load(rollout / sync)
    assert list(arrived) == list(sent) and len(sent[MANIFEST_NAME]) > BUCKET
    for name, tensor in sent.items():
        assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bit_view(arrived[name]), bit_view(tensor)), name
    assert damage(arrived) == []


def test_a_bit_that_changed_on_the_way_is_named(rollout):
    assert damage(torch.load(rollout / "flipped")) == ["odd: bfloat16[7] arrived with other values"]


def test_a_trainer_that_ended_is_missed(rollout):
    error = (rollout / "lost.txt").read_text()
    assert error.startswith("vp_gloo: rank 1 of 2 (0 is the trainer) lost another rank while it received")
    assert "Look for the process that ended first" in error and not (rollout / "lost").exists()


def test_buckets_are_bounded_and_the_stream_is_not_read_ahead():
    weights = iter(WEIGHTS.items())

    async def sizes() -> list[int]:
        buckets = GlooCheckpointEngine(BUCKET)._buckets(weights)
        first = len((await anext(buckets))[1])
        assert next(weights)[0] == "odd", "the second tensor"
        return [first, *[len(payload) async for _, payload in buckets]]

    assert max(found := asyncio.run(sizes())) == BUCKET and len(found) == 8


def test_other_actor_ranks_only_walk_the_stream():
    actor, rollout = GlooCheckpointEngine.build_topology(3, 2, [("host", 1), None, None, None, None])
    assert (actor["rank"], rollout["rank"]) == ([0, -1, -1], [1, 2]) and set(actor["world_size"]) == {3}
    engine, weights = GlooCheckpointEngine(BUCKET), iter(WEIGHTS.items())
    engine.init_process_group(-1, 3, ("host", 1))
    asyncio.run(engine.send_weights(weights))
    assert next(weights, None) is None


def test_the_manifest_survives_the_pieces_of_verls_nccl_and_nixl():
    """They leave out what is empty, an empty weight too, and cast nothing: tests/check/rules/test_rules.py."""
    whole = {name: tensor.contiguous() for name, tensor in WEIGHTS.items() if tensor.nbytes % 8 == 0}
    arrived = asyncio.run(
        taken(merge_weight_chunks(split_weight_chunks(send_with_manifest(iter(whole.items())), 4096), 4096))
    )
    assert "empty" in whole and "empty" not in arrived and damage(arrived) == []
