"""Which samples and scores are missing, and who computes them."""

from dataclasses import dataclass
from pathlib import Path

from verl_precision.offline.store import Store


@dataclass(frozen=True)
class Work:
    """What one process does with one model in one dtype.

    Attributes:
        kind: sample or score.
        dtype: the engine's.
        shards: (rollout dtype, shard) of each file to write.
    """

    kind: str
    dtype: str
    shards: tuple[tuple[str, int], ...]

    def files(self, store: Store) -> list[Path]:
        """Return the files this work writes, in the order of `shards`."""
        if self.kind == "sample":
            return [store.sample_file(rollout, shard) for rollout, shard in self.shards]
        return [store.score_file(self.dtype, rollout, shard) for rollout, shard in self.shards]


def all_work(store: Store, kind: str) -> list[Work]:
    """Return everything a finished analysis has done, one a dtype.

    Args:
        store: the analysis.
        kind: sample or score.
    """
    shards, settings = range(len(store.shards)), store.settings
    if kind == "sample":
        return [Work(kind, dtype, tuple((dtype, s) for s in shards)) for dtype in settings.rollout_dtypes]
    everything = tuple((rollout, s) for rollout in settings.rollout_dtypes for s in shards)
    return [Work(kind, dtype, everything) for dtype in settings.train_dtypes]


def missing(store: Store, work: Work) -> Work | None:
    """Return the part of the work whose files do not exist, None if all do."""
    left = tuple(shard for shard, file in zip(work.shards, work.files(store), strict=True) if not file.exists())
    return Work(work.kind, work.dtype, left) if left else None


def split(work: Work, parts: int) -> list[Work]:
    """Deal the shards of a work to at most `parts` processes, each with at least one."""
    dealt = (work.shards[part::parts] for part in range(parts))
    return [Work(work.kind, work.dtype, shards) for shards in dealt if shards]


def responses_done(store: Store, work: Work) -> int:
    """Return how many responses of the work are on disk."""
    done = (shard for (_, shard), file in zip(work.shards, work.files(store), strict=True) if file.exists())
    return sum(len(store.shards[shard]) for shard in done)


def responses_asked(store: Store, work: Work) -> int:
    """Return how many responses the work is about."""
    return sum(len(store.shards[shard]) for _, shard in work.shards)
