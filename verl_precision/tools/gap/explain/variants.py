"""The path from the rollout's log-probs to the trainer's: each variant changes one thing of the one before.

    vLLM, as it samples            μ
     │ temperature                 divided by the temperature
     │ sampling                    without top-p and top-k
     │ cache                       without prefix cache and chunked prefill
     │ decode                      the same tokens as a prompt
     │ batch                       each sequence alone
     │ cuda_graphs                 not compiled
     │ rollout_precision           in FP32, with the weights that 16 bits hold
     │ engine                      in verl's FSDP engine, FP32
     │ weights                     with the trainer's weights
     │ merged_lora                 with base and adapter apart, not rounded
     │ weight_rounding             rounded as the trainer rounds them
     │ trainer_precision           in the trainer's dtype
     │ attention                   with the trainer's attention
     │ output_head                 with the trainer's output head
     │ log_probs                   with the trainer's log-probs
     ▼ layout                      all sequences together, as it packs them
    the trainer                    π

So whatever separates two neighbours is measured, and the parts of a token's gap add up to it. What a job does not have
is left out. Between `rollout_precision` and `trainer_precision` all is FP32: there two right engines differ by FP32's
rounding alone, which is five orders of magnitude below BF16's, and anything else is a fault that no precision hides.

In a mixture of experts every step may also choose other experts. What that does is taken out of the steps, and stands
for itself (`tools/gap/explain/routing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from verl_precision.base.dtypes import Dtype
from verl_precision.tools.gap.explain.settings import Explanation

ROLLOUT = "rollout"
REFERENCE = "reference"  # off the path: the trainer's engine in BF16
REPLAYED = "replayed"  # off the path: the trainer's engine in FP32, with the experts that another variant chose


@dataclass(frozen=True)
class Variant:
    """Something that gives log-probs to the tokens."""

    name: str  # its name in the journal
    cause: str  # what separates it from the variant before
    words: str  # what it is, in words
    engine: Literal["vllm", "trainer"]  # which engine computes
    model: Literal["rollout", "trainer"]  # whose weights it has: those of the rollout, or the trainer's
    rounded_to: Dtype | None  # dtype to which they are rounded before they are loaded; None for no rounding
    dtype: Dtype  # dtype of the computation
    adapter: bool = False  # whether base and LoRA adapter are apart; else the adapter is merged
    alone: bool = False  # whether sequences are computed one by one
    draws: bool = False  # whether it draws the tokens itself, and does not score those of the rollout
    tempered: bool = True  # of vLLM: whether log-probs are those of the temperature
    processed: bool = True  # of vLLM: whether log-probs are those after top-p and top-k
    cached: bool = False  # of vLLM: whether it has a prefix cache and cuts prompts into chunks
    compiled: bool = False  # of vLLM: whether it compiles, and runs CUDA graphs
    attention: str = "sdpa"  # of the trainer
    packed: bool = False  # of the trainer: whether sequences are packed without padding
    fp32_output_head: bool = False  # of the trainer
    fp32_log_probs: bool = True  # of the trainer
    # Of a mixture of experts: whether the chosen experts are recorded, or replayed.
    routing: Literal["", "recorded", "replayed"] = ""

    @property
    def process(self) -> "Variant":
        """What one process can compute: variants with the same differ in what they are asked alone."""
        return replace(self, name="", cause="", words="", alone=False, draws=False)


def variants(job: Explanation, routed: bool = False) -> list[Variant]:
    """Return the variants, the rollout first and the trainer last.

    Args:
        job: What is explained.
        routed: Whether the model is a mixture of experts, whose choices are recorded.
    """
    rollout, train = job.rollout_dtype, job.train_dtype
    chain = [
        Variant(
            name=ROLLOUT,
            cause="",
            words=f"vLLM as it samples, {rollout}",
            engine="vllm",
            model="rollout",
            rounded_to=None,
            dtype=rollout,
            draws=True,
            tempered=not job.untempered,
            processed=not job.raw_log_probs,
            cached=job.prefix_caching,
            compiled=job.cuda_graphs,
            routing="recorded" if routed else "",
        )
    ]

    def then(cause: str, words: str, name: str = "", wanted: bool = True, **changes: Any) -> None:
        if wanted:
            chain.append(replace(chain[-1], name=name or cause, cause=cause, words=words, **changes))

    then("temperature", "divided by the temperature", "tempered", job.untempered, tempered=True)
    then("sampling", "without top-p and top-k", "untruncated", job.truncated, processed=False)
    then("cache", "without prefix cache and chunked prefill", "uncached", job.prefix_caching, cached=False)
    then("decode", "the same tokens as a prompt", "prefill", processed=True, draws=False)
    then("batch", "each sequence alone", "prefill_alone", alone=True)
    then("cuda_graphs", "not compiled, without CUDA graphs", "eager", job.cuda_graphs, compiled=False)
    fp32 = f"vLLM in fp32, weights rounded to {rollout}"
    then("rollout_precision", fp32, "rollout_fp32", rollout != "fp32", dtype="fp32", rounded_to=rollout)
    then("engine", "verl's FSDP engine in fp32, the same weights", "engine_fp32", engine="trainer")
    then("weights", "with the trainer's weights", wanted=job.rollout_model is not None, model="trainer")
    apart = "base and adapter apart, not rounded"
    then("merged_lora", apart, wanted=job.adapter is not None, adapter=True, rounded_to=None)
    rounding = ("weights not rounded", None) if train == "fp32" else (f"weights rounded to {train}", train)
    other = train != rollout and job.adapter is None
    then("weight_rounding", rounding[0], wanted=other, rounded_to=rounding[1])
    in_dtype: dict[str, Any] = {"rounded_to": None, "model": "trainer", "dtype": train}  # the engine rounds the weights
    then("trainer_precision", f"in {train}", "trainer_alone", train != "fp32", **in_dtype)
    then("attention", f"attention {job.attention}", wanted=job.attention != "sdpa", attention=job.attention)
    then("output_head", "output head in fp32", wanted=job.fp32_output_head, fp32_output_head=True)
    then("log_probs", f"log-probs in {train}", wanted=not job.fp32_log_probs, fp32_log_probs=False)
    layout = f"the trainer as it trains: {'packed' if job.packed else 'padded'} micro-batches"
    then("layout", layout, "trainer", alone=False, packed=job.packed)
    return chain


def reference(job: Explanation, chain: Sequence[Variant]) -> tuple[Variant, Variant]:
    """Return two variants between which lies BF16 in the trainer's engine alone; the second may be off the path."""
    if job.train_dtype == "bf16":
        after = next(one for one in chain if one.cause == "trainer_precision")
        return chain[chain.index(after) - 1], after
    before = next(one for one in chain if one.cause == "engine")
    return before, replace(before, name=REFERENCE, cause="", words="the trainer's engine in bf16", dtype="bf16")


def replayed(chain: Sequence[Variant]) -> Variant:
    """Return the trainer's engine in FP32, which computes with the experts that another variant chose."""
    engine = next(one for one in chain if one.cause == "engine")
    return replace(engine, name=REPLAYED, cause="", words="with the experts of another variant", routing="replayed")
