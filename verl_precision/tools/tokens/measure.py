"""From responses to one row of metrics for each step, with the tokens of one chunk in memory."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np
import torch

from verl_precision.base.mergeable import Mean, StatisticSet
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.monitor import PHANTOM, MismatchMonitor
from verl_precision.mismatch.packing import FlatBatch
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.tools.runs.read import REWARD
from verl_precision.tools.tokens.formats import Response

CHUNK_TOKENS = 1 << 19


class _Rewards(StatisticSet):
    prefix = ""


def rows_of(responses: Iterable[Response], clip: ClipRange | None = None) -> list[dict[str, Any]]:
    """Return the rows of verl's metrics file in the order of steps; a step's responses may lie apart."""
    steps, tokens = dict[int, MismatchMonitor](), 0

    def chunk_of(response: Response) -> tuple[int, bool, int]:
        nonlocal tokens
        tokens += len(response.mask)
        return response.step, response.shadow is None, tokens // CHUNK_TOKENS

    for (step, *_), chunk in groupby(responses, key=chunk_of):
        _measure(steps.setdefault(step, MismatchMonitor(clip=clip, gather=False)), list(chunk))
    return [{"step": step, "data": steps[step].take_metrics()} for step in sorted(steps)]


def _measure(monitor: MismatchMonitor, chunk: list[Response]) -> None:
    names = "trainer", "rollout", "mask", "advantages", *(("shadow",) if chunk[0].shadow is not None else ())
    flat = [torch.from_numpy(np.concatenate([getattr(each, name) for each in chunk])) for name in names]
    pi, mu, mask, advantages, *shadow = flat
    offsets = torch.tensor([0, *(len(each.mask) for each in chunk)]).cumsum(0)
    batch = FlatBatch((pi, mu), mask != 0, advantages, offsets, torch.tensor([each.ended for each in chunk]))
    monitor.add_batch(batch)
    if shadow:
        with_shadow = batch._replace(log_probs=(pi, *shadow, mu))
        monitor.add(PHANTOM, PhantomStatistics.of_batch(with_shadow, monitor.clip))
    rewards = torch.tensor([float(each.reward) for each in chunk if each.reward is not None], dtype=torch.float64)
    if len(rewards):
        monitor.add(REWARD, _Rewards({REWARD: Mean(rewards.sum(), torch.ones_like(rewards).sum())}))
