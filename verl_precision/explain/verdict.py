"""Which steps are faults and which are what a dtype costs, and what helps against each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_precision.explain.allotment import Allotment, Part
from verl_precision.explain.path import Station
from verl_precision.explain.settings import Explanation

_BITS = {"bf16": 8, "fp16": 11, "fp32": 24}  # of the significand
_FLOOR = 2e-6  # nats: FP32's own rounding of a log-prob


@dataclass(frozen=True)
class Cause:
    """What is known of a cause.

    Attributes:
        title: What it is.
        rounding_of: Whose dtype makes the step: rollout, trainer, both, or neither, which leaves FP32's. Empty if
            rounding is no excuse.
        most: How many times that dtype's cost is still right.
        remedy: What to do.
        effect: What that does, and what it costs.
    """

    title: str
    rounding_of: tuple[str, ...]
    most: float
    remedy: str
    effect: str


CAUSES: Mapping[str, Cause] = {
    "temperature": Cause(
        "the rollout's log-probs are not divided by the temperature it draws at",
        (),
        0,
        "rollout.logprobs_mode=processed_logprobs",
        "no cost",
    ),
    "sampling": Cause(
        "top-p or top-k leaves tokens out, and the trainer does not know it",
        (),
        0,
        "+sampling_masks=replay, or rollout.top_p=1 rollout.top_k=-1",
        "ratio 1 up to rounding; the kept token ids travel with each response (docs/sampling_masks.md)",
    ),
    "cache": Cause(
        "vLLM's prefix cache or chunked prefill changes its log-probs",
        ("rollout",),
        2,
        "rollout.enable_prefix_caching=False, then rollout.enable_chunked_prefill=False",
        "prompts are computed once a response; report it to vLLM with journal.jsonl",
    ),
    "decode": Cause(
        "vLLM's decode is not its prefill",
        ("rollout",),
        2,
        "try another attention backend of vLLM",
        "slower sampling while you look for it; report it to vLLM with journal.jsonl",
    ),
    "batch": Cause(
        "vLLM's answer depends on what else is in the batch",
        ("rollout",),
        2,
        "VLLM_BATCH_INVARIANT=1",
        "slower kernels in the rollout",
    ),
    "cuda_graphs": Cause(
        "vLLM compiled is not vLLM as it is written",
        ("rollout",),
        2,
        "rollout.enforce_eager=True",
        "slower decoding; report it to vLLM with journal.jsonl",
    ),
    "rollout_precision": Cause(
        "rounding in the rollout",
        ("rollout",),
        2,
        "precision=fp16",
        "k3 about 64 times smaller than in BF16; no memory",
    ),
    "engine": Cause(
        "the two engines do not compute the same function: it remains in FP32",
        ("neither",),
        20,
        "compare the implementations: config.json (rms_norm_eps, rope), kernels, buffers that are kept in 16 bits",
        "no precision mends this",
    ),
    "weights": Cause(
        "the rollout has other weights than the trainer",
        (),
        0,
        "sync them before each rollout (docs/weight_sync.md); with an asynchronous trainer, fewer versions behind",
        "the gap of a right sync",
    ),
    "staleness": Cause(
        "the responses are older than the trainer's weights",
        (),
        0,
        "fewer versions behind, or a loss that weighs them: estimator=grpo_seq_mis",
        "fewer responses in flight",
    ),
    "weight_rounding": Cause(
        "the two sides round the weights to different dtypes",
        ("rollout", "trainer"),
        2,
        "the same dtype on both sides: precision=fp16",
        "the gap of one dtype",
    ),
    "trainer_precision": Cause(
        "rounding in the trainer",
        ("trainer",),
        2,
        "precision=fp16",
        "k3 about 64 times smaller than in BF16; no memory",
    ),
    "attention": Cause(
        "the trainer's attention kernel is not sdpa",
        ("trainer",),
        2,
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa, to compare",
        "slower and more memory with long sequences",
    ),
    "output_head": Cause(
        "the trainer's output head is in FP32, and vLLM's is not",
        ("trainer",),
        2,
        "fsdp_config.fp32_output_head=False",
        "half the memory of the logits",
    ),
    "log_probs": Cause(
        "the trainer takes log-probs in 16 bits",
        ("trainer",),
        0.5,
        "fsdp_config.fp32_log_probs=True",
        "no memory, 1% of time",
    ),
    "layout": Cause(
        "the trainer disagrees with itself when sequences are packed or padded otherwise",
        ("trainer",),
        2,
        "model.use_remove_padding, ppo_max_token_len_per_gpu: compare both settings; is attention told the boundaries?",
        "a right kernel differs by rounding alone",
    ),
    "routing": Cause(
        "the two sides choose other experts",
        ("rollout", "trainer"),
        2,
        "+router_replay=rollout",
        "the trainer computes with the rollout's experts, at the same speed (docs/router_replay.md)",
    ),
}


@dataclass(frozen=True)
class Finding:
    """What is said of one step."""

    station: Station
    cause: Cause
    part: Part
    expected: float  # nats: the size that rounding alone would have
    fault: bool  # whether it is more than that
    evidence: str = ""  # what else was seen


def findings(
    job: Explanation,
    stations: Sequence[Station],
    allotment: Allotment,
    bf16_cost: float,
    evidence: Mapping[str, str],
) -> list[Finding]:
    """Judge each step; faults come first, the largest part of the k3 before.

    Args:
        job: What is explained.
        stations: The path.
        allotment: Its parts.
        bf16_cost: Mean |δ| that BF16 makes in the trainer's engine, nats. A dtype with n more bits is expected to make
            2⁻ⁿ of it.
        evidence: Cause -> what else was seen, in words.
    """
    dtypes = {"rollout": job.rollout_dtype, "trainer": job.train_dtype, "neither": "fp32"}
    found = []
    for station, part in zip(stations[1:], allotment.parts, strict=True):
        cause = CAUSES[station.cause]
        bits = [_BITS[dtypes[side]] for side in cause.rounding_of]
        expected = bf16_cost * 2.0 ** (_BITS["bf16"] - min(bits)) if bits else 0.0
        fault = part.size > max(cause.most * expected, _FLOOR)
        found.append(Finding(station, cause, part, expected, fault, evidence.get(station.cause, "")))
    return sorted(found, key=lambda one: (not one.fault, -one.part.k3))
