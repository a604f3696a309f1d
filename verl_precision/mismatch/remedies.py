"""What each alarm means, whether it may end a run, and what to try, strongest first."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from typing_extensions import Self

MATCH_PRECISIONS = "match the precisions: precision=fp16 (trainer and rollout in FP16, FP32 master weights)"
SHADOW_RATIO = "take the ratio from a forward in the rollout's precision: ratio_source=shadow"
WIDEN_CLIP = "widen the clip range (actor.clip_ratio_low, actor.clip_ratio_high), or do without: estimator=cispo"
DECOUPLE = "take the ratio against the trainer's own log-probs: algorithm.rollout_correction.bypass_mode=False"
WEIGH_SEQUENCES = "weigh whole responses by π/μ: estimator=pg_seq_mis or grpo_seq_mis"
MORE_RESPONSES = "take more responses an update (actor.ppo_mini_batch_size, rollout.n), or shorter ones"
EXPLAIN = (
    "find the cause: verl-precision explain --run FOLDER, then --recipe with the run's overrides (docs/explain.md)"
)
LOWER_RATE = "lower the learning rate"
_BEYOND_FP16 = "if its activations exceed FP16's 65504 (verl-precision check --model PATH --activations)"
TRAIN_BF16 = f"train this model with precision=bf16 {_BEYOND_FP16}"
SAMPLE_BF16 = f"sample this model with actor_rollout_ref.rollout.dtype=bfloat16 {_BEYOND_FP16}"
VERIFY_SYNCS = "run with the package's rollout, which verifies each sync (any precision preset), and read its message"
GO_BACK_TO_FINITE = "look for NaN in the weights of the last checkpoint, and go back to one without"
GO_BACK = (
    "go back to a checkpoint from before the first step named here; what follows is learned from a biased gradient"
)


@dataclass(frozen=True)
class Advice:
    """The advice that one alarm gives."""

    meaning: str  # for the run
    try_first: tuple[str, ...]  # strongest fix first
    severe: bool  # `on_alarm=stop` ends the run: the gradient is wrong, or there is none

    def without(self, in_use: Collection[str]) -> Self:
        """Return the advice without the remedies that a run has already."""
        return replace(self, try_first=tuple(remedy for remedy in self.try_first if remedy not in in_use))


def remedies_in_use(train: str, rollout: str, weighs_sequences: bool, verifies_syncs: bool) -> frozenset[str]:
    """Return the remedies that a run has already.

    It has them by the dtypes of trainer and rollout (bf16, fp16 or fp32), by weighing or rejecting responses by their
    ratio to the rollout, and by the package's rollout, which verifies syncs.
    """
    has = {
        MATCH_PRECISIONS: train == rollout != "bf16",
        TRAIN_BF16: train == "bf16",
        SAMPLE_BF16: rollout == "bf16",
        WEIGH_SEQUENCES: weighs_sequences,
        VERIFY_SYNCS: verifies_syncs,
    }
    return frozenset(remedy for remedy, on in has.items() if on)


_GROWTH = Advice(
    "Trainer and rollout drift apart on the same tokens and weights. In the FP16 paper every run that collapsed showed "
    "this first (arXiv 2510.26788, section 4); stable runs stayed bounded.",
    (MATCH_PRECISIONS, WEIGH_SEQUENCES, EXPLAIN, GO_BACK),
    severe=True,
)

ADVICE = {
    "k3_growth": _GROWTH,
    "gap_growth": _GROWTH,
    "trainer_not_finite": Advice(
        "The TRAINER's forward gives log-probs that are NaN or infinite. Responses with such a token have no gradient.",
        (GO_BACK_TO_FINITE, LOWER_RATE, TRAIN_BF16),
        severe=True,
    ),
    "rollout_not_finite": Advice(
        "The ROLLOUT reports log-probs that are NaN or infinite. Losses that weigh by them drop the whole response.",
        (SAMPLE_BF16, VERIFY_SYNCS, GO_BACK_TO_FINITE),
        severe=True,
    ),
    "responses_not_finite": Advice(
        "The loss leaves out responses: a log-prob, an advantage or a weight of theirs is NaN or infinite.",
        (
            "see which: mismatch/nonfinite_trainer_tokens and mismatch/nonfinite_rollout_tokens count log-probs; if "
            "both are 0, look at rewards and advantages",
        ),
        severe=True,
    ),
    "extreme_prob_gap": Advice(
        "On some token one engine gives nearly 1 and the other nearly 0, step after step. Runs on their way to a "
        "collapse end up here (arXiv 2510.26788, section 4); BF16 runs of that paper started at -0.9 to -1.0, so it "
        "never ends a run.",
        (MATCH_PRECISIONS, WEIGH_SEQUENCES, EXPLAIN),
        severe=False,
    ),
    "phantom_clipping": Advice(
        "Tokens are clipped, with a gradient of exactly zero, that would not be without the precision gap. The run may "
        "stall for good.",
        (MATCH_PRECISIONS, SHADOW_RATIO, WIDEN_CLIP, DECOUPLE),
        severe=False,
    ),
    "low_effective_sample_size": Advice(
        "A few responses, or tokens (the line above says which), have nearly all of the weight or are all that a mask "
        "keeps: the gradient is noise. At an effective share of 0.1 of the responses a run learned nothing, at 0.02 it "
        "lost what it had (docs/log/collapse.md, dose and response). At 0 there is no gradient; if NaN is the cause, "
        "another alarm names the engine.",
        (MATCH_PRECISIONS, MORE_RESPONSES),
        severe=False,
    ),
    "repeated_overflow": Advice(
        "Updates overflow and are skipped step after step: the policy hardly moves.",
        (
            "look at loss and grad_norm of the steps before the first one named here; lower the learning rate",
            "start lower: fsdp_config.loss_scale.initial",
            TRAIN_BF16,
        ),
        severe=True,
    ),
    "loss_scale_at_minimum": Advice(
        "The loss scale has no room left: small gradients round to zero, and the next overflow cannot be answered.",
        (
            "look for inf or NaN in the forward or the data: so small a scale does not overflow by itself",
            LOWER_RATE,
            TRAIN_BF16,
        ),
        severe=False,
    ),
    "policies_differ": Advice(
        "Trainer and rollout do not compute one policy. Right after the start, or suddenly: a weight sync did not "
        "take, and the rollout samples from other weights. After growth reported before: the run has collapsed.",
        (
            VERIFY_SYNCS,
            "compare trainer and rollout settings: model path, LoRA merge, temperature, quantisation",
            EXPLAIN,
            GO_BACK,
        ),
        severe=True,
    ),
}
