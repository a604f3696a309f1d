"""A run that repeats bit for bit: prompts are named by their place, and the seed of a request comes from that name.

verl names prompts at random and orders a batch as responses arrive. Here a name consists of the step and the place in
it, and batches are sorted by name: the preset `repeatable=bitwise` chooses `SortedReplayBuffer` as the run's sampler.
The agent loop seeds each request by its prompt's name (`rollout.custom.seeded`). See docs/options.md.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_precision.integration.ledger import require_feature


def name_prompts(trainer: Any) -> None:
    """Make verl name the prompts of a trainer, the only one in its process, by step and place."""
    from verl.trainer.ppo.v1 import trainer_base

    require_feature("repeatable")
    named = Counter[int]()  # by step

    def name() -> str:
        named[trainer.global_steps] += 1
        return f"{trainer.global_steps:08d}x{named[trainer.global_steps]:06d}"

    trainer_base.uuid = SimpleNamespace(uuid4=name)


class SortedReplayBuffer(ReplayBuffer):
    """verl's replay buffer, whose batches are in the order of their prompts' names, sessions and outputs."""

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        _, partition, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        return sorted(sampleable_keys)[:batch_size], partition, steps  # by step first, as verl does

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        ordered = dict(sorted(partition_snapshot.items(), key=lambda item: _place(item[0])))
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)


def _place(key: str) -> tuple[str | int, ...]:
    """Return the parts of verl's key `{uid}_{session}_{output}`, with numbers that sort as numbers."""
    uid, *rest = key.split("_")
    return uid, *map(int, rest)
