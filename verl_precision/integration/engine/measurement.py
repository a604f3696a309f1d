"""Measures the mismatch in the worker during an update: for bypass mode, and for α and β with a shadow.

The trainer puts a request into a batch's data (`run_monitor.py`). The worker returns statistics that can be merged
(`merged_metrics.py`). The wrapped method is `BaseEngine.train_batch`, which every engine of verl inherits.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from verl_precision.base.loggers import mismatch as logger
from verl_precision.base.mergeable import Count
from verl_precision.engine.settings import ShadowSettings
from verl_precision.engine.shadow import OF_SHADOW, OF_TRAINING
from verl_precision.integration.ledger import wrapping
from verl_precision.integration.trainer.merged_metrics import MergedMetric
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.candidates import Candidates
from verl_precision.mismatch.distillation import DistillationStatistics
from verl_precision.mismatch.groups import MismatchByTurn, MismatchByVersion, beta_of_current_version
from verl_precision.mismatch.monitor import DISTILLATION, MISMATCH, PHANTOM, TURNS
from verl_precision.mismatch.packing import flattened
from verl_precision.mismatch.phantom import PhantomStatistics

# Keys in a batch's data: the request; how many versions behind each response is, if any response is; and each
# response's lot (`candidates.lot_of`), if tokens are kept.
REQUEST = "verl_precision_measure"
VERSIONS_BEHIND = "verl_precision_versions_behind"
LOTS = "verl_precision_lots"
# Keys of what comes back beside the sets of statistics of `mismatch.monitor`.
CANDIDATES = "verl_precision/candidates"
FAILED = "verl_precision/failed_measurements"


class MeasureOrder(TypedDict):
    """The trainer's request to measure, as plain data that travels with a batch."""

    mismatch: bool  # whether the worker measures the gap; otherwise the driver does
    rollout_as_shadow: bool  # whether the rollout stands for a shadow where none runs
    bypass: bool  # whether the old log-probs are the rollout's
    # the loss's `ClipRange`, if its importance ratio divides by the rollout's probability
    clip: tuple[bool, float, float, float] | None
    beta_in_ratio: bool  # whether the loss gets the training forward's log-probs, not the shadow's
    longest_response: int  # tokens; a response of this length was cut
    keep: int  # number of responses whose tokens are kept
    distillation: bool  # whether the batch has a teacher's log-probs


@dataclass
class MeasuredUpdates:
    """The updates that are measured: the first of a training step, whose weights are still those of the rollout."""

    request: MeasureOrder | None = None  # of the update under way
    steps: int = 0
    first_of_step: bool = True

    def need_shadow(self, shadow: ShadowSettings) -> bool:
        """Return whether α and β are measured in the update under way."""
        return self.request is not None and shadow.every_n_steps > 0 and self.steps % shadow.every_n_steps == 0


def updates_of(engine: Any) -> MeasuredUpdates:
    """Return the state of an engine's measured updates."""
    return vars(engine).setdefault("measured_updates", MeasuredUpdates())


@wrapping("BaseEngine.train_batch")
def measure_every_engine(wrapped, instance, args, kwargs):
    """Train as verl does, in any engine; measure an update that the trainer requests."""
    given = dict(zip(("data", "loss_function"), args, strict=False)) | kwargs
    request = tu.get(given["data"], key=REQUEST, default=None)
    if request is None:
        return wrapped(*args, **kwargs)
    updates = updates_of(instance)
    if updates.first_of_step:
        updates.request = request
        given["loss_function"] = with_metrics(given["loss_function"], functools.partial(measure, request))
    try:
        return wrapped(**given)
    finally:
        updates.request = None
        updates.first_of_step = tu.get(given["data"], key="update_lr_scheduler", default=True)
        updates.steps += updates.first_of_step


def with_metrics(loss_function: Callable, measured: Callable[[Any, Any], Mapping[str, Any]]) -> Callable:
    """Return verl's loss function with further metrics, measured from model output and micro-batch before the loss."""

    def loss_and_metrics(*args: Any, **kwargs: Any) -> Any:
        # Without both: top-k distillation calls this for its part of the logits, and a critic has values.
        if not {"log_probs", "distillation_losses"} & {*kwargs.get("model_output", ())}:
            return loss_function(*args, **kwargs)
        further = measured(kwargs["model_output"], kwargs["data"])
        loss, metrics = loss_function(*args, **kwargs)
        return loss, {**metrics, **further}

    return loss_and_metrics


def measure(request: MeasureOrder, output: Mapping[str, Tensor], data: Any) -> dict[str, MergedMetric]:
    """Measure one micro-batch. After a failure, log and count it; the run goes on without this micro-batch's numbers.

    The keys do not depend on a failure: verl merges the ranks by the keys of the first rank.
    """
    failed, found = 0.0, dict[str, Any]({MISMATCH: MismatchByVersion(), PHANTOM: PhantomStatistics()})
    if request["mismatch"]:
        found[TURNS] = MismatchByTurn()
    if request["keep"]:
        found[CANDIDATES] = Candidates(request["keep"])
    if request["distillation"]:
        found[DISTILLATION] = DistillationStatistics()
    try:
        found |= _measure(request, output, data)
    except Exception:  # a failed measurement must not end a user's run
        failed = 1.0
        logger.exception("the mismatch of a micro-batch could not be measured; training continues without it")
    found[FAILED] = Count(torch.tensor(failed))
    return {key: MergedMetric([statistic]) for key, statistic in found.items()}


def _measure(request: MeasureOrder, output: Mapping[str, Tensor], data: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "distillation_losses" in output:
        losses = no_padding_2_padding(output["distillation_losses"].detach(), data)
        found[DISTILLATION] = DistillationStatistics.of_truncated(losses, data["response_mask"].to_padded_tensor(0))
        if "log_probs" not in output:
            return found
    fields = ["response_mask", "advantages"]
    if "rollout_log_probs" in data:
        fields.append("rollout_log_probs")
    elif request["bypass"]:
        fields.append("old_log_probs")  # they are the rollout's
    else:
        raise KeyError("the worker did not receive rollout_log_probs")
    padded = data.select(*fields).to_padded_tensor()
    mask, advantages, rollout = (padded[name] for name in fields)
    trainer = no_padding_2_padding(output.get(OF_TRAINING, output["log_probs"]).detach(), data)
    shadow = no_padding_2_padding(output[OF_SHADOW], data) if OF_SHADOW in output else None
    behind = _of_responses(data, VERSIONS_BEHIND) or [0] * len(mask)
    lengths_B = data["response_mask"].offsets().diff()
    ended = ended_by_themselves(data["response_mask"], request["longest_response"])
    clip = None if request["clip"] is None else ClipRange(*request["clip"])
    log_probs = trainer, *(() if shadow is None else (shadow,)), rollout
    flat = flattened(*log_probs, mask=mask, advantages=advantages, ended=ended)
    batch = flat._replace(log_probs=(flat.log_probs[0], flat.log_probs[-1]))
    if request["distillation"] and not found:
        teacher = no_padding_2_padding(data["teacher_logprobs"], data).flatten()
        found[DISTILLATION] = DistillationStatistics.of_batch(batch._replace(log_probs=(teacher, *batch.log_probs)))
    if request["mismatch"]:
        found[MISMATCH] = MismatchByVersion.of_batch(batch, behind)
        found[TURNS] = MismatchByTurn.of_batch(batch, found[MISMATCH].whole, lengths_B)
    if shadow is not None:
        found[PHANTOM] = PhantomStatistics.of_batch(flat, clip, request["beta_in_ratio"])
    elif request["rollout_as_shadow"]:
        found[PHANTOM] = beta_of_current_version(batch, behind, clip)
    if request["keep"] and request["mismatch"]:
        lots, lengths = _of_responses(data, LOTS), lengths_B.tolist()
        found[CANDIDATES] = Candidates.of_batch(request["keep"], lots, flat, lengths)
    return found


def _of_responses(data: Any, field: str) -> list[int]:
    """Return a field with one whole number for each response; empty where there is none."""
    values = data.get(field, None)
    return [] if values is None else (values.values() if values.is_nested else values).flatten().tolist()


def ended_by_themselves(response_mask: Tensor, longest_response: int) -> Tensor:
    """Return [B] bool: whether a response was not cut, that is, has fewer tokens than the rollout allows."""
    return response_mask.offsets().diff() < longest_response  # type: ignore[attr-defined]
