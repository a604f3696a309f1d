"""Runs of two steps that several tests look at: each estimator preset once, some of them on MoE and LoRA."""

# Low enough for two steps without a skip: GSPO gives a one-token response of this task 64 times a token's usual weight,
# and 65536 then overflows now and then. Finding the scale is the engine's test, not these.
FP16 = ("precision=fp16", "actor_rollout_ref.actor.fsdp_config.loss_scale.initial=1024")
BF16 = ("precision=bf16",)
TWO_STEPS = "trainer.total_training_steps=2"

_LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")
VARIANTS = {
    "moe": ("estimator=grpo_seq_mis", "tiny_architecture=qwen3_moe"),
    "lora adapter": ("estimator=grpo_token_tis", *_LORA),
    "lora merged": ("estimator=gspo", *_LORA, "actor_rollout_ref.model.lora.merge=True"),
}


def of_estimator(estimator: str) -> tuple[str, ...]:
    """Return the overrides of the FP16 run that shows an estimator preset."""
    choice = f"estimator={estimator}"
    variant = next((variant for variant in VARIANTS.values() if choice in variant), (choice,))
    return (*variant, *FP16, TWO_STEPS)
