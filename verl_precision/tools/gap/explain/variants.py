"""The path from the rollout's log-probs to the trainer's: each variant changes one setting of the variant before.

The differences between neighbours are measured, and add up to a token's gap. Steps that do not apply are left out.
Between `rollout_precision` and `trainer_precision` all is in FP32. There two correct engines differ only by FP32's
rounding, five orders of magnitude below BF16's; more is a fault. Exact arithmetic needs no step in FP32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from verl_precision.base.dtypes import EXACT, Dtype
from verl_precision.tools.jobs.settings import Explanation

ROLLOUT = "rollout"
REPLAYED = "replayed"  # off the path: the trainer's engine in FP32, with the experts that another variant chose


@dataclass(frozen=True)
class Variant:
    """A way to compute log-probs of the tokens."""

    name: str  # its name in the journal
    cause: str  # the cause that separates it from the variant before
    words: str  # its description
    engine: Literal["vllm", "trainer"]  # which engine computes
    model: Literal["rollout", "trainer"]  # whose weights it has: those of the rollout, or the trainer's
    rounded_to: Dtype | None  # dtype to which the weights are rounded before they are loaded; None for no rounding
    dtype: Dtype  # dtype of the computation
    alone: bool = False  # whether sequences are computed one by one
    draws: bool = False  # whether it draws the tokens itself; otherwise it scores those of the rollout
    tempered: bool = True  # of vLLM: whether log-probs are those of the temperature
    processed: bool = True  # of vLLM: whether log-probs are those after top-p and top-k
    cached: bool = False  # of vLLM: whether it has a prefix cache and cuts prompts into chunks
    compiled: bool = False  # of vLLM: whether it compiles, and runs CUDA graphs
    attention: str = "sdpa"  # of the trainer
    packed: bool = False  # of the trainer: whether sequences are packed without padding
    fp32_output_head: bool = False  # of the trainer
    fp32_log_probs: bool = True  # of the trainer
    arithmetic: str = "native"  # of all operations, as in `engine.arithmetic_choice`
    routing: Literal["", "recorded", "replayed"] = ""  # in a mixture of experts: the use of its choices

    @property
    def process(self) -> "Variant":
        """The settings of a process. Variants with the same value differ only in their requests."""
        return replace(self, name="", cause="", words="", alone=False, draws=False)

    @property
    def series(self) -> tuple[str, str | None]:
        """The key of the variant's series in the store."""
        return (self.name, None) if self.draws else (ROLLOUT, self.name)


def variants(job: Explanation, routed: bool = False) -> list[Variant]:
    """Return the variants, the rollout first and the trainer last; choices of experts are recorded if `routed`."""
    rollout, train = job.rollout_dtype, job.train_dtype
    untempered = job.raw_log_probs and job.temperature != 1  # log-probs have another temperature than the sampling
    truncated = not job.raw_log_probs and (job.top_p < 1 or job.top_k > 0)  # log-probs are over fewer than all tokens
    chain = [
        Variant(
            ROLLOUT, "", f"vLLM as it samples, {rollout}", "vllm", "rollout", None, rollout, draws=True,
            tempered=not untempered, processed=not job.raw_log_probs, cached=job.prefix_caching,
            compiled=job.cuda_graphs, arithmetic=job.arithmetic, routing="recorded" if routed else "",
        )
    ]  # fmt: skip

    def then(cause: str, words: str, name: str = "", wanted: bool = True, **changes: Any) -> None:
        if wanted:
            chain.append(replace(chain[-1], name=name or cause, cause=cause, words=words, **changes))

    then("temperature", "divided by the temperature", "tempered", untempered, tempered=True)
    then("sampling", "without top-p and top-k", "untruncated", truncated, processed=False)
    then("cache", "without prefix cache and chunked prefill", "uncached", job.prefix_caching, cached=False)
    then("decode", "the same tokens as a prompt", "prefill", processed=True, draws=False)
    then("batch", "each sequence alone", "prefill_alone", alone=True)
    then("cuda_graphs", "not compiled, without CUDA graphs", "eager", job.cuda_graphs, compiled=False)
    exact, held = job.arithmetic == EXACT, None if rollout == "fp32" else rollout
    fp32 = f"vLLM in fp32, weights rounded to {rollout}"
    then("rollout_precision", fp32, "rollout_fp32", not exact and rollout != "fp32", dtype="fp32", rounded_to=held)
    engine = f"verl's FSDP engine in {'exact arithmetic' if exact else 'fp32'}, the same weights"
    then("engine", engine, "engine_exact" if exact else "engine_fp32", engine="trainer", rounded_to=held)
    then("weights", "with the trainer's weights", wanted=job.rollout_model is not None, model="trainer")
    words, rounded_to = ("weights not rounded", None) if train == "fp32" else (f"weights rounded to {train}", train)
    then("weight_rounding", words, wanted=train != rollout, rounded_to=rounded_to)
    in_dtype: dict[str, Any] = {"rounded_to": None, "model": "trainer", "dtype": train}  # the engine rounds the weights
    then("trainer_precision", f"in {train}", "trainer_alone", train != "fp32" and not exact, **in_dtype)
    then("attention", f"attention {job.attention}", wanted=job.attention != "sdpa", attention=job.attention)
    then("output_head", "output head in fp32", wanted=job.fp32_output_head, fp32_output_head=True)
    then("log_probs", f"log-probs in {train}", wanted=not job.fp32_log_probs, fp32_log_probs=False)
    layout = f"the trainer as it trains: {'packed' if job.packed else 'padded'} micro-batches"
    then("layout", layout, "trainer", alone=False, packed=job.packed)
    return chain


def engine_of(chain: Sequence[Variant]) -> Variant:
    """Return the trainer's engine in FP32, or in exact arithmetic, with the rollout's weights."""
    return next(one for one in chain if one.cause == "engine")


def reference(job: Explanation, chain: Sequence[Variant]) -> tuple[Variant, Variant]:
    """Return two variants that differ only by BF16 in the trainer's engine; they may be off the path."""
    engine = engine_of(chain)
    in_bf16 = replace(engine, name="reference", cause="", words="the trainer's engine in bf16", dtype="bf16")
    if job.arithmetic == EXACT:
        in_fp32 = replace(engine, name="reference_fp32", cause="", words="the trainer's engine in fp32", dtype="fp32")
        return in_fp32, engine if job.rollout_dtype == "bf16" else in_bf16
    if job.train_dtype == "bf16":
        after = next(one for one in chain if one.cause == "trainer_precision")
        return chain[chain.index(after) - 1], after
    return engine, in_bf16
