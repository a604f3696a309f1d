"""The mismatch of any training loop: measure each micro-batch, and end each step with metrics, alarms and a verdict."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.loggers import mismatch as logger
from verl_precision.base.mergeable import Mergeable, merge_by_name
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm, act_on
from verl_precision.mismatch.groups import MismatchByTurn, MismatchByVersion
from verl_precision.mismatch.packing import FlatBatch, flattened
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.mismatch.verdict import Judge, Verdict

# Names of the sets of statistics.
MISMATCH = "verl_precision/mismatch_statistics"
TURNS = "verl_precision/turn_statistics"
PHANTOM = "verl_precision/phantom_statistics"
DISTILLATION = "verl_precision/distillation_statistics"


class StepReport(NamedTuple):
    """What one step has shown."""

    metrics: dict[str, float]  # by the names of docs/metrics.md
    alarms: list[Alarm]  # raised by this step
    verdict: Verdict  # on all steps so far


class MismatchMonitor:
    """Measures the mismatch of one run; it needs torch, and no framework.

    Micro-batches and ranks merge exactly: the metrics are those of the whole batch, however it is cut.

    Args:
        settings: When to raise an alarm, and what an alarm does. None: the defaults, which only log.
        clip: Where the loss clips a ratio that divides by the rollout's probability, `ClipRange.around_one(0.2, 0.28)`.
            None if the loss has no clip or divides by other log-probs: then there are no metrics of clipping.
        in_use: Remedies that the run uses already, of `alarm.remedies_in_use`; no alarm suggests them.
        gather: Whether `end_of_step` merges the ranks of torch.distributed's default group, if there is one.

    Example:
        >>> monitor = MismatchMonitor()
        >>> pi, mu = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])  # log-probs of a response
        >>> monitor.measure(pi, mu, mask=torch.ones(1, 2), advantages=torch.tensor([0.7]))
        >>> report = monitor.end_of_step(1)
        >>> report.metrics["mismatch/log_prob_gap_mean"], report.alarms, report.verdict.word
        (0.25, [], 'too short to judge')
    """

    def __init__(
        self,
        settings: AlarmSettings | None = None,
        clip: ClipRange | None = None,
        in_use: Collection[str] = (),
        gather: bool = True,
    ) -> None:
        self.alarm, self.clip, self.gather = MismatchAlarm(settings, in_use), clip, gather
        self.judge = Judge(self.alarm)
        self._sets: dict[str, Any] = {}

    def measure(
        self,
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor | None,
        advantages: Tensor | None = None,
        *,
        shadow: Tensor | None = None,
        ratio: Literal["training", "shadow"] = "training",
        ended: Tensor | None = None,
        versions_behind: Sequence[int] | None = None,
    ) -> None:
        """Add a micro-batch of whole responses to the step.

        Args:
            trainer_log_probs: [B, T] floating, log π(yₜ) in nats of the trainer, or nested (torch.jagged).
            rollout_log_probs: Likewise, log μ(yₜ), which the rollout gave with the tokens.
            mask: [B, T], nonzero where the policy wrote a token; with nested log-probs nested, or None for all tokens.
            advantages: [B, T], nested, or [B]; only the sign matters. None leaves out the metrics by sign.
            shadow: Log-probs of the trainer's present weights in the rollout's precision, for alpha, beta and
                phantom clipping (docs/metrics.md). They need advantages. None: no `phantom/...` metrics.
            ratio: Whose log-probs are above the bar of the loss's ratio: the training forward's, or the shadow's.
            ended: [B] bool, the responses that ended by themselves. None: all of them.
            versions_behind: For each response, how many updates ago its weights were the trainer's. None: 0.

        Raises:
            ConfigurationError: If shapes, layouts or types do not fit, or what a shadow needs is missing. The values
                of masked tokens have no effect. Tokens with a NaN, an infinite or a positive log-prob are counted and
                left out.
        """
        if ratio != "training" and (ratio != "shadow" or shadow is None):
            raise ConfigurationError(setting="ratio", value=ratio, allowed="training; shadow, if there is a shadow")
        if shadow is not None and advantages is None:
            raise ConfigurationError(setting="advantages", value=None, allowed="advantages, where there is a shadow")
        log_probs = trainer_log_probs, *(() if shadow is None else (shadow,)), rollout_log_probs
        flat, lengths = flattened(*log_probs, mask=mask, advantages=advantages, ended=ended), None
        if not trainer_log_probs.is_nested:  # padding follows the last token that the policy wrote
            lengths = (flat.mask.view(trainer_log_probs.shape).bool().flip(1).cumsum(dim=1) > 0).sum(dim=1)
        self.add_batch(flat._replace(log_probs=(flat.log_probs[0], flat.log_probs[-1])), versions_behind, lengths)
        if shadow is not None:
            self.add(PHANTOM, PhantomStatistics.of_batch(flat, self.clip, ratio == "training"))

    def add_batch(
        self, batch: FlatBatch, versions_behind: Sequence[int] | None = None, lengths: Tensor | None = None
    ) -> None:
        """Add the mismatch of a flat batch; `lengths` are those of `MismatchByTurn.of_batch`."""
        gap = MismatchByVersion.of_batch(batch, versions_behind or [0] * (len(batch.offsets) - 1))
        self.add(MISMATCH, gap)
        self.add(TURNS, MismatchByTurn.of_batch(batch, gap.whole, lengths))

    def add(self, name: str, found: Mergeable) -> None:
        """Add a set of statistics of your own to the step; it merges with those of its name, and has `metrics()`."""
        self._sets = merge_by_name([self._sets, {name: found}])

    def merge(self, other: "MismatchMonitor") -> None:
        """Add what the monitor of another process, sent by pickle, has measured in this step."""
        self._sets = merge_by_name([self._sets, other._sets])

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of everything that was added since the last call, of all ranks, without undefined ones."""
        mine, self._sets = self._sets, {}
        sets = [mine]
        if self.gather and dist.is_available() and dist.is_initialized():
            sets = [{}] * dist.get_world_size()
            dist.all_gather_object(sets, mine)
        return {name: value for part in merge_by_name(sets).values() for name, value in part.metrics().items()}

    def end_of_step(self, step: int, further: Mapping[str, float] | None = None) -> StepReport:
        """Close a step. With torch.distributed all ranks must call it, and all return the same report.

        Args:
            step: Its number; each call has a greater one.
            further: Other metrics of the step, the same on all ranks: `critic/score/mean` (the mean reward) for the
                verdict, `precision/loss_scale` and others that an alarm reads.

        Raises:
            MismatchAlarmError: If a severe alarm was raised and the settings say `on_alarm="stop"`.
        """
        metrics = {**(further or {}), **self.take_metrics()}
        raised = self.judge.update(step, metrics)
        act_on(raised, self.alarm.settings, log=logger.warning)
        return StepReport(metrics, raised, self.judge.verdict())

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON for a resumed run, at the end of a step; the verdict begins anew with the rewards."""
        return self.alarm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. An unreadable state raises `CheckpointStateError` and changes nothing."""
        self.alarm.load_state_dict(state)
