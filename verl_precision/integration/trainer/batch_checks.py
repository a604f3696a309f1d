"""The trainer callback that checks a batch once its advantages are known: what can it teach, does the trainer agree?

The trainer scores the same tokens with the same weights in two packings. Rounding gives a gap of about the gap to the
rollout or less. Positions or masks that a packing breaks give a larger one, which no precision closes.
"""

from typing import Any, Self

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from verl_precision.base.mergeable import Mean, StatisticSet
from verl_precision.integration.trainer.run_monitor import fetch_rows, real_rows
from verl_precision.mismatch.alarm import GAP_FLOOR
from verl_precision.mismatch.signal import Signal

FIRST_STEPS = 2  # always measured: a packing is right or wrong from the start
PER_RANK = 4  # responses that each rank scores together, then one by one
FEWEST_TOKENS = 128  # of these responses: the ratio of fewer is noise (docs/log/features.md)


class SelfGap(StatisticSet):
    """The gap between two packings, and its ratio to the smaller of their gaps to the rollout; mergeable."""

    prefix = "mismatch/self_gap_"

    @classmethod
    def of_tokens(cls, *log_probs_N: Tensor, mask_N: Tensor) -> Self:
        """Measure the trainer's log-probs, alone and packed, and the rollout's; what is not finite is left out."""
        valid_N = mask_N.bool() & torch.stack(log_probs_N).isfinite().all(dim=0)
        alone, usual, rollout = (part[valid_N].double() for part in log_probs_N)
        gap, tokens = alone - usual, valid_N.sum()
        # Of a broken packing and a sound one, only the sound one is near the rollout.
        to_rollout = torch.minimum((usual - rollout).abs().sum(), (alone - rollout).abs().sum())
        to_rollout = to_rollout.clamp(min=GAP_FLOOR * tokens.item())
        k3, total = Mean((gap.expm1() - gap).sum(), tokens), gap.abs().sum()
        return cls.on_cpu({"abs_mean": Mean(total, tokens), "k3": k3, "ratio": Mean(total, to_rollout)})


class BatchChecks:
    """The checks of one run; its monitor times them, counts failures, and reports the metrics."""

    def __init__(self, trainer: Any) -> None:
        """Take a trainer that has its monitor."""
        self._trainer, self._config, self._monitor = trainer, trainer.config, trainer.monitor

    def _compute_advantage(self, proceed, batch, metrics):
        batch = proceed(batch, metrics=metrics)
        step, every = self._trainer.global_steps, self._monitor.settings.self_gap_every_n_steps
        with self._monitor.guarded():
            self._monitor.add("signal", self.signal(batch))
        if step <= FIRST_STEPS or (every and step % every == 0):
            with self._monitor.guarded():
                self._monitor.add("self_gap", self.self_gap(self._trainer.actor_rollout_wg, batch))
        return batch

    def signal(self, batch: Any) -> Signal:
        """Measure what a batch can teach, in any mode; of a session's outputs the last one, which has the reward."""
        keys = sorted(real_rows(batch)[0], key=lambda key: int(key.rpartition("_")[2]))  # uid_session_output
        last = {key.rpartition("_")[0]: key for key in keys}
        found = fetch_rows([*last.values()], batch.partition_id, "rm_scores", "advantages", "responses")
        rewards = torch.stack([scores.double().sum() for scores in found["rm_scores"]])
        prompts = [session.rpartition("_")[0] for session in last]
        longest, estimator = self._monitor.request["longest_response"], self._config.algorithm.adv_estimator
        return Signal.of_batch(prompts, rewards, found["advantages"], found["responses"], longest, estimator)

    def self_gap(self, workers: Any, batch: Any) -> SelfGap:
        """Let verl's workers score the longest responses twice, each rank as many; too few tokens give no metrics."""
        import transfer_queue as tq

        rows = sorted(zip(*real_rows(batch), strict=True), key=lambda row: row[1]["response_len"], reverse=True)
        if len(rows) < (number := PER_RANK * workers.world_size):
            return SelfGap()
        data = tq.kv_batch_get(keys=[key for key, _ in rows[:number]], partition_id=batch.partition_id)
        if data["response_mask"].values().sum() < FEWEST_TOKENS:
            return SelfGap()
        data = data.select(*(key for key, value in data.items() if isinstance(value, Tensor) or "multi_modal" in key))
        rollout = self._config.actor_rollout_ref.rollout
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=rollout.temperature)
        if not rollout.log_prob_use_dynamic_bsz:  # as the run packs; a divisor of PER_RANK
            together = max(size for size in (1, 2, 4) if size <= (rollout.log_prob_micro_batch_size_per_gpu or 1))
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=together)
        usual = _log_probs(workers, data)
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        parts = _log_probs(workers, data), usual, data["rollout_log_probs"].values()
        return SelfGap.of_tokens(*parts, mask_N=data["response_mask"].values())


def _log_probs(workers: Any, data: Any) -> Tensor:
    scored = tu.get(workers.compute_log_prob(data), "log_probs").float().cpu()
    return response_from_nested(scored, data["response_mask"]).values()
