"""A run that repeats bit for bit: its prompts have names that say their place, and requests seeds of these names.

verl names prompts at random and orders a batch as responses arrive. Names here are made of the step and of the place in
it, and batches are sorted by them: the preset `repeatable=bitwise` chooses `SortedReplayBuffer` as the run's sampler.
The agent loop seeds each request by its prompt's name (`rollout.custom.seeded`). See docs/repeatable.md.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_precision.integration.ledger import require_feature


class _Names:
    """What verl's trainer takes for the module `uuid`: names of step and place, the same in each run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._step, self._named = -1, 0

    def uuid4(self) -> str:
        """Return the next name of the trainer's step."""
        if self._step != self._trainer.global_steps:
            self._step, self._named = self._trainer.global_steps, 0
        self._named += 1
        return f"{self._step:08d}x{self._named:06d}"


def name_prompts(trainer: Any) -> None:
    """Have verl name the prompts of this process's trainer, of which it has one, by step and place."""
    from verl.trainer.ppo.v1 import trainer_base

    require_feature("repeatable")
    trainer_base.uuid = _Names(trainer)


class SortedReplayBuffer(ReplayBuffer):
    """verl's replay buffer, whose batches are in the order of their prompts' names, sessions and outputs."""

    def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
        _, partition, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        return sorted(sampleable_keys)[:batch_size], partition, steps  # by step first, as verl does

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        ordered = dict(sorted(partition_snapshot.items(), key=lambda item: _place(item[0])))
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)


def _place(key: str) -> tuple[str | int, ...]:
    """Return the parts of verl's key `{uid}_{session}_{output}`, in an order of numbers."""
    uid, *rest = key.split("_")
    return uid, *map(int, rest)
