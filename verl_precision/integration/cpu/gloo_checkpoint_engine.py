"""A checkpoint engine of verl over gloo: the weights reach a rollout that has processes of its own, without a GPU.

The backend is `vp_gloo`, and `checkpoint_engine.custom_backend_module` names this module, which verl then imports in
the driver, the actor and the rollout. Actor rank 0 broadcasts to all ranks of the rollout; the other actor ranks only
walk the stream, whose tensors are gathered from all of them. Each sync has a group of its own, beside torch's default
group. Every tensor arrives bit for bit, also an empty one, which verl's engines leave out.
"""

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, TensorMeta
from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks

from verl_precision.base.errors import WeightSyncError
from verl_precision.base.verl_config import GLOO
from verl_precision.weight_sync.manifest import Weights

TIMEOUT = timedelta(minutes=10)  # a rank that does not answer for this time is lost
_ALIGNMENT = 16  # bytes: a piece of a bucket can be viewed in any dtype
Bucket = tuple[list[TensorMeta], Tensor]  # pieces of tensors, and their bytes


@CheckpointEngineRegistry.register(GLOO)
class GlooCheckpointEngine(CheckpointEngine):
    """One process's end of the weight sync; see the module's docstring."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """Keep the size of a bucket (bytes that are sent at once; each side holds two), and whether this is rank 0."""
        self._bucket_size, self._is_master = bucket_size, is_master
        self._rank, self._world_size = -1, 0
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the store at which a sync's ranks meet; return its address, on actor rank 0."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        return host, self._store.port

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> tuple[Any, Any]:
        """Return the arguments of `init_process_group`: actor ranks other than 0 have rank -1, and no group."""
        size = 1 + rollout_world_size

        def side(*ranks: int) -> dict[str, list[Any]]:
            return {"rank": [*ranks], "world_size": [size] * len(ranks), "address": metadata[:1] * len(ranks)}

        return side(0, *[-1] * (actor_wg_world_size - 1)), side(*range(1, size))

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Connect to the other ranks."""
        self._rank, self._world_size = rank, world_size
        if rank >= 0:
            with self._losing_nobody("connected"):
                if not self._is_master:
                    self._store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
                self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    @torch.no_grad()
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Send a stream; the next bucket is filled while one is on its way. A lost rank is a `WeightSyncError`."""
        if self._rank < 0:
            for _ in weights:
                pass
            return
        in_thread = asyncio.get_running_loop().run_in_executor
        sending: Any = asyncio.sleep(0)
        async for bucket in self._buckets(weights):
            await sending
            sending = in_thread(None, self._send, bucket)
        await sending
        await in_thread(None, self._send, ([], torch.empty(0, dtype=torch.uint8)))  # the end
        await in_thread(None, self._broadcast)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield a stream as it was sent; the next bucket is received while one is used. Errors as in `send_weights`."""
        async for name, weight in merge_weight_chunks(self._received_pieces(), self._bucket_size):
            yield name, weight

    async def _received_pieces(self) -> AsyncIterator[tuple[TensorMeta, Tensor]]:
        in_thread = asyncio.get_running_loop().run_in_executor
        pieces, payload = await in_thread(None, self._receive)
        while pieces:
            coming = in_thread(None, self._receive)
            for piece in pieces:
                yield piece, payload[piece.offset : piece.offset + piece.chunk_size]
            pieces, payload = await coming
        await in_thread(None, self._broadcast)

    async def _buckets(self, weights: Weights) -> AsyncIterator[Bucket]:
        """Copy a stream into buckets, because its tensors may change as soon as the next one is asked for."""
        pieces: list[TensorMeta] = []
        payload, end = torch.empty(self._bucket_size, dtype=torch.uint8), 0
        async for piece, chunk in _pieces(weights, self._bucket_size):
            piece.offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            if piece.offset + piece.chunk_size > self._bucket_size:
                yield pieces, payload[:end]
                pieces, payload, piece.offset = [], torch.empty_like(payload), 0
            end = piece.offset + piece.chunk_size
            payload[piece.offset : end].copy_(chunk)
            pieces.append(piece)
        if pieces:
            yield pieces, payload[:end]

    def _send(self, bucket: Bucket) -> None:
        about = torch.frombuffer(bytearray(pickle.dumps(bucket[0])), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(about), len(bucket[1])]), about, bucket[1])

    def _receive(self) -> Bucket:
        self._broadcast(sizes := torch.zeros(2, dtype=torch.int64))
        about, payload = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
        self._broadcast(about, payload)
        return pickle.loads(about.numpy().tobytes()), payload

    def _broadcast(self, *tensors: Tensor) -> None:
        """Broadcast tensors; without any, wait until all ranks have come this far."""
        with self._losing_nobody("sent" if self._rank == 0 else "received"):
            for tensor in filter(len, tensors):
                self._group.broadcast(tensor, 0).wait()
            if not tensors:
                self._group.barrier().wait()

    @contextmanager
    def _losing_nobody(self, doing: str) -> Iterator[None]:
        """Turn an error of gloo in the block into one that says which rank missed another."""
        try:
            yield
        except RuntimeError as error:
            problem = f"{GLOO}: rank {self._rank} of {self._world_size} (0 is the trainer) lost another rank"
            raise WeightSyncError(
                f"{problem} while it {doing}: {error}. Look for the process that ended first"
            ) from error


async def _pieces(weights: Weights, bucket_size: int) -> AsyncIterator[tuple[TensorMeta, Tensor]]:
    """Yield verl's pieces of each tensor, and one without bytes for an empty tensor."""
    for name, weight in weights:
        if not weight.nbytes:
            yield TensorMeta(name, weight.shape, weight.dtype, 0, 0, 0), torch.empty(0, dtype=torch.uint8)
        async for piece in split_weight_chunks(iter([(name, weight.detach().contiguous())]), bucket_size):
            yield piece
