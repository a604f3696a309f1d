"""verl's V1 trainers with the mismatch among their metrics: `vp_sync`, `vp_colocate_async`, `vp_separate_async`.

In decoupled mode verl has recomputed the trainer's log-probs already, so the statistics need no extra forward. In
bypass mode there are none before the update (`old_log_probs` are the rollout's own), and nothing is reported.
"""

from types import ModuleType

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.statistics import MismatchSums

PREFIX = "vp_"


def register_trainers(v1: ModuleType) -> None:
    """Register a measuring variant of each of verl's V1 trainers, once."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for mode in ("sync", "colocate_async", "separate_async"):
        if PREFIX + mode not in TRAINER_REGISTRY:
            v1.register_trainer(PREFIX + mode)(_measuring(TRAINER_REGISTRY[mode], mode))


def _measuring(base: type, mode: str) -> type:
    class MeasuringTrainer(base):  # type: ignore[misc, valid-type]
        __doc__ = f"{base.__name__} that reports the training-inference mismatch at every step; see {__name__}."

        def __init__(self, config):
            if not config.actor_rollout_ref.rollout.calculate_log_probs:
                raise ConfigurationError(
                    f"actor_rollout_ref.rollout.calculate_log_probs=False with trainer.v1.trainer_mode={PREFIX}{mode}: "
                    "without the rollout's log-probs there is no mismatch to measure. Set it to True, or "
                    f"trainer.v1.trainer_mode={mode}."
                )
            # verl chooses buffers and settings by the mode's name: to it, this is its own mode.
            config.trainer.v1.trainer_mode = mode
            super().__init__(config)

        def _compute_old_log_prob(self, batch, metrics):
            batch = super()._compute_old_log_prob(batch, metrics=metrics)
            correction = self.config.algorithm.get("rollout_correction") or {}
            if not correction.get("bypass_mode", False):
                metrics.update(_statistics(batch))
            return batch

    MeasuringTrainer.__name__ = MeasuringTrainer.__qualname__ = f"Measuring{base.__name__}"
    return MeasuringTrainer


def _statistics(batch) -> dict[str, float]:
    import transfer_queue as tq

    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    padded = data.to_padded_tensor()
    sums = MismatchSums()
    sums.update(*(padded[name] for name in fields))
    return sums.metrics()
