"""What is known of each cause: whose rounding excuses it, what it is, and what helps against it."""

from collections.abc import Mapping
from dataclasses import dataclass

# Two computations that round independently differ by √2 times what one rounding makes; a fifth more is left for chance.
MOST = 1.7


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
        MOST,
        "rollout.enable_prefix_caching=False, then rollout.enable_chunked_prefill=False",
        "prompts are computed once a response; report it to vLLM with journal.jsonl",
    ),
    "decode": Cause(
        "vLLM's decode is not its prefill",
        ("rollout",),
        MOST,
        "try another attention backend of vLLM",
        "slower sampling while you look for it; report it to vLLM with journal.jsonl",
    ),
    "batch": Cause(
        "vLLM's answer depends on what else is in the batch",
        ("rollout",),
        MOST,
        "VLLM_BATCH_INVARIANT=1",
        "slower kernels in the rollout",
    ),
    "cuda_graphs": Cause(
        "vLLM compiled is not vLLM as it is written",
        ("rollout",),
        MOST,
        "rollout.enforce_eager=True",
        "slower decoding; report it to vLLM with journal.jsonl",
    ),
    "rollout_precision": Cause(
        "rounding in the rollout",
        ("rollout",),
        MOST,
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
    "merged_lora": Cause(
        "merging rounds what the adapter has learned to the rollout's dtype",
        ("rollout",),
        MOST,
        "precision=fp16",
        "FP16 keeps changes an eighth as large; no memory",
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
        MOST,
        "the same dtype on both sides: precision=fp16",
        "the gap of one dtype",
    ),
    "trainer_precision": Cause(
        "rounding in the trainer",
        ("trainer",),
        MOST,
        "precision=fp16",
        "k3 about 64 times smaller than in BF16; no memory",
    ),
    "attention": Cause(
        "the trainer's attention kernel is not sdpa",
        ("trainer",),
        MOST,
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa, to compare",
        "slower and more memory with long sequences",
    ),
    "output_head": Cause(
        "the trainer's output head is in FP32, and vLLM's is not",
        ("trainer",),
        MOST,
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
        MOST,
        "model.use_remove_padding, ppo_max_token_len_per_gpu: compare both settings; is attention told the boundaries?",
        "a right kernel differs by rounding alone",
    ),
    "routing": Cause(
        "the two sides choose other experts",
        ("rollout", "trainer"),
        MOST,
        "+router_replay=rollout",
        "the trainer computes with the rollout's experts, at the same speed (docs/router_replay.md)",
    ),
}
