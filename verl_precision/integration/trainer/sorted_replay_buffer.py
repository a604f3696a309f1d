"""verl's replay buffer in an order that chance does not decide; a run chooses it as its custom sampler."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


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
