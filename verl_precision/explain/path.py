"""The path from the rollout's log-probs to the trainer's: at each station one thing is different from the one before.

    vLLM, as it samples            μ
     │ sampling                    without top-p and top-k
     │ decode                      the same tokens as a prompt
     │ batch                       each sequence alone
     │ rollout_precision           in FP32, with the weights that 16 bits hold
     │ engine                      in verl's FSDP engine, FP32
     │ weights                     with the trainer's weights
     │ weight_rounding             rounded as the trainer rounds them
     │ trainer_precision           in the trainer's dtype
     │ attention                   with the trainer's attention
     │ log_probs                   with the trainer's log-probs
     ▼ layout                      all sequences together, as it packs them
    the trainer                    π

So whatever separates two neighbours is measured, and the parts of a token's gap add up to it. What a job does not have
is left out. Between `rollout_precision` and `trainer_precision` all is FP32: there two right engines differ by FP32's
rounding alone, which is five orders of magnitude below BF16's, and anything else is a fault that no precision hides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from verl_precision.explain.settings import Explanation
from verl_precision.sampling.engine import Dtype

ROLLOUT = "rollout"
REFERENCE = "reference"  # off the path: the trainer's engine in BF16


@dataclass(frozen=True)
class Station:
    """Something that gives log-probs to the tokens.

    Attributes:
        name: Its name in the journal.
        cause: What separates it from the station before.
        words: What it is, in words.
        engine: Which engine computes.
        model: Whose weights it has: those of the rollout, or the trainer's.
        rounded_to: Dtype to which they are rounded before they are loaded; None for no rounding.
        dtype: Dtype of the computation.
        alone: Whether sequences are computed one by one.
        draws: Whether it draws the tokens itself, and does not score those of the rollout.
        processed: Of vLLM: whether log-probs are those after top-p and top-k.
        attention: Of the trainer.
        packed: Of the trainer: whether sequences are packed without padding.
        fp32_log_probs: Of the trainer.
    """

    name: str
    cause: str
    words: str
    engine: Literal["vllm", "trainer"]
    model: Literal["rollout", "trainer"]
    rounded_to: Dtype | None
    dtype: Dtype
    alone: bool = False
    draws: bool = False
    processed: bool = True
    attention: str = "sdpa"
    packed: bool = False
    fp32_log_probs: bool = True

    @property
    def process(self) -> "Station":
        """What one process can compute: stations with the same differ in what they are asked alone."""
        return replace(self, name="", cause="", words="", alone=False, draws=False)


def path(job: Explanation) -> list[Station]:
    """Return the stations, the rollout first and the trainer last."""
    return list(_stations(job))


def _stations(job: Explanation) -> Iterator[Station]:
    rollout, train = job.rollout_dtype, job.train_dtype
    one = Station(ROLLOUT, "", f"vLLM as it samples, {rollout}", "vllm", "rollout", None, rollout, draws=True)
    yield one
    if job.truncated:
        one = replace(one, name="untruncated", cause="sampling", words="without top-p and top-k", processed=False)
        yield one
    one = replace(one, name="prefill", cause="decode", words="the same tokens as a prompt", processed=True, draws=False)
    yield one
    one = replace(one, name="prefill_alone", cause="batch", words="each sequence alone", alone=True)
    yield one
    grid = None if rollout == "fp32" else rollout
    if rollout != "fp32":
        words = f"vLLM in fp32, weights rounded to {rollout}"
        one = replace(one, name="rollout_fp32", cause="rollout_precision", words=words, rounded_to=grid, dtype="fp32")
        yield one
    words = "verl's FSDP engine in fp32, the same weights"
    one = replace(one, name="engine_fp32", cause="engine", words=words, engine="trainer", rounded_to=grid)
    yield one
    if job.rollout_model is not None:
        one = replace(one, name="weights", cause="weights", words="with the trainer's weights", model="trainer")
        yield one
    if train != rollout:
        rounded = "weights not rounded" if train == "fp32" else f"weights rounded to {train}"
        to = None if train == "fp32" else train
        one = replace(one, name="weight_rounding", cause="weight_rounding", words=rounded, rounded_to=to)
        yield one
    if train != "fp32":
        words = f"in {train}"
        one = replace(
            one,
            name="trainer_alone",
            cause="trainer_precision",
            words=words,
            rounded_to=None,
            model="trainer",
            dtype=train,
        )  # the engine itself rounds the weights
        yield one
    if job.attention != "sdpa":
        words = f"attention {job.attention}"
        one = replace(one, name="attention", cause="attention", words=words, attention=job.attention)
        yield one
    if not job.fp32_log_probs:
        words = f"log-probs in {train}"
        one = replace(one, name="log_probs", cause="log_probs", words=words, fp32_log_probs=False)
        yield one
    words = f"the trainer as it trains: {'packed' if job.packed else 'padded'} micro-batches"
    yield replace(one, name="trainer", cause="layout", words=words, alone=False, packed=job.packed)


def reference(job: Explanation, stations: Sequence[Station]) -> tuple[Station, Station]:
    """Return two stations between which lies BF16 in the trainer's engine alone; the second may be off the path."""
    if job.train_dtype == "bf16":
        after = next(one for one in stations if one.cause == "trainer_precision")
        return stations[stations.index(after) - 1], after
    before = next(one for one in stations if one.cause == "engine")
    return before, replace(before, name=REFERENCE, cause="", words="the trainer's engine in bf16", dtype="bf16")
