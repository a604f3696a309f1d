"""What each alarm means, whether it may end a run, and what to try, strongest first."""

from dataclasses import dataclass

MATCH_PRECISIONS = "match the precisions: precision=fp16 (trainer and rollout in FP16, FP32 master weights)"
SHADOW_RATIO = "take the ratio from a forward in the rollout's precision: ratio_source=shadow"
WIDEN_CLIP = "widen the clip range (actor.clip_ratio_low, actor.clip_ratio_high) until it is off: grpo_unclipped"
WEIGH_SEQUENCES = "weigh whole responses by π/μ: estimator=pg_seq_mis or grpo_seq_mis"
GO_BACK = (
    "go back to a checkpoint from before the first step named here; what follows is learned from a biased gradient"
)


@dataclass(frozen=True)
class Advice:
    """What is known about one alarm.

    Attributes:
        meaning: What it says of the run.
        try_first: Strongest fix first.
        severe: Whether `on_alarm=stop` ends the run: the gradient is wrong, or there is none.
    """

    meaning: str
    try_first: tuple[str, ...]
    severe: bool


_GROWTH = Advice(
    "Trainer and rollout drift apart on the same tokens and weights. In the FP16 paper every run that collapsed showed "
    "this first (arXiv 2510.26788, section 4); stable runs stayed bounded.",
    (MATCH_PRECISIONS, WEIGH_SEQUENCES, GO_BACK),
    severe=True,
)

ADVICE = {
    "k3_growth": _GROWTH,
    "gap_growth": _GROWTH,
    "mismatch_not_finite": Advice(
        "The log-probs of trainer or rollout are NaN or infinite: nothing can be learned from them.",
        (
            "look for NaN in the weights of the last checkpoint, and go back to one without",
            "lower the learning rate, or train this model with precision=bf16 if its activations exceed FP16's 65504 "
            "(verl-precision check --model PATH --activations)",
        ),
        severe=True,
    ),
    "extreme_prob_gap": Advice(
        "On some token one engine gives nearly 1 and the other nearly 0, step after step. Runs on their way to a "
        "collapse end up here (arXiv 2510.26788, section 4); BF16 runs of that paper started at -0.9 to -1.0, so it "
        "never ends a run.",
        (MATCH_PRECISIONS, WEIGH_SEQUENCES),
        severe=False,
    ),
    "beta_beyond_clip": Advice(
        "The precision gap β alone pushes tokens out of the clip range: clipping is decided by rounding, not by what "
        "the policy did.",
        (MATCH_PRECISIONS, SHADOW_RATIO, WIDEN_CLIP),
        severe=False,
    ),
    "phantom_clipping": Advice(
        "Tokens are clipped, with a gradient of exactly zero, that would not be without the precision gap. The run may "
        "stall for good.",
        (MATCH_PRECISIONS, SHADOW_RATIO, WIDEN_CLIP),
        severe=False,
    ),
    "skipped_step_storm": Advice(
        "Updates overflow and are skipped step after step: the policy hardly moves.",
        (
            "look at loss and grad_norm of the steps before the first one named here; lower the learning rate",
            "start lower: fsdp_config.loss_scale.initial",
            "train this model with precision=bf16 if its activations exceed FP16's 65504 "
            "(verl-precision check --model PATH --activations)",
        ),
        severe=True,
    ),
    "loss_scale_at_minimum": Advice(
        "The loss scale has no room left: small gradients round to zero, and the next overflow cannot be answered.",
        (
            "look for inf or NaN in the forward or the data: so small a scale does not overflow by itself",
            "lower the learning rate, or train this model with precision=bf16",
        ),
        severe=False,
    ),
    "policies_differ": Advice(
        "Trainer and rollout do not compute one policy. Right after the start, or suddenly: a weight sync did not "
        "take, and the rollout samples from other weights. After growth reported before: the run has collapsed.",
        (
            "run with the package's rollout, which verifies each sync (any precision preset), and read its message",
            "compare trainer and rollout settings: model path, LoRA merge, temperature, quantisation",
            GO_BACK,
        ),
        severe=True,
    ),
}
