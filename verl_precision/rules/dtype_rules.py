"""Rules of the dtypes: settings that are ignored, contradict each other, or lose precision without a word."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.rules.dtypes import (
    FSDP,
    HALF,
    engine_kwargs,
    engines,
    lora_is_merged,
    rollout_dtype,
    short,
    transport_dtype,
)
from verl_precision.rules.rule import Case, Environment, rule

ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"
# `_FLOAT16_NOT_SUPPORTED_MODELS` in vllm/config/model.py of 0.28.0 (compared by tests/rules/test_rules.py); plamo2 was
# in it before.
VLLM_REFUSES_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
ADAM_EPS = 1e-8  # torch's default
# Half of FP16's smallest subnormal, 2**-24: what is not above it rounds to zero.
FP16_ZERO = 2.0**-25


@rule(
    "dtype-ignored",
    setting="{engine.setting}.dtype",
    problem="verl's FSDP engine never reads it; the {engine.role} computes in {engine.compute}, from {engine.source}.",
    allowed="the dtype of mixed_precision.param_dtype ({engine.compute})",
    remedy="Choose precision={said}, or set {engine.setting}.mixed_precision.param_dtype={said}.",
)
def dtype_ignored(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl documents `fsdp_config.dtype`; its FSDP engine never reads it."""
    for engine in engines(config):
        said = short(engine.node.get("dtype", "bf16"))
        # bfloat16 is verl's default, so that nobody need have said it; this package's engine refuses it by itself
        if engine.strategy in FSDP and not engine.ours and said not in ("bf16", engine.compute):
            yield {"engine": engine, "said": said}


@rule(
    "rollout-contradicts-actor",
    setting=ROLLOUT_DTYPE,
    problem="the actor computes in {actor}: {effect}",
    allowed="{actor}, or a precision preset that names both",
    remedy="Choose precision={actor}, or a preset that names the pair, as <train>_train_<rollout>_rollout.",
)
def rollout_contradicts(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The rollout samples in another dtype than the actor trains in, and no preset asked for that."""
    actor, rollout = engines(config)[0].compute, rollout_dtype(config)
    if rollout == "auto":
        rollout = short(environment.model.get("dtype") or environment.model.get("torch_dtype") or "auto")
    if rollout == actor or (actor, rollout) == asked_pair(config):
        return
    if rollout == "auto":
        yield {"actor": actor, "effect": "vLLM will decide from the model's files.", "severity": "warning"}
    else:
        yield {"actor": actor, "effect": "every token's log-prob carries the difference."}


def asked_pair(config: DictConfig) -> tuple[str, str] | None:
    """Return the (actor, rollout) dtypes of the precision preset that was chosen, or None.

    A preset is made of two halves, and Hydra records which: no list of pairs is kept here. A value overridden after the
    choice differs from the preset's, and is then not what the preset asked for.
    """
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    halves = {group.partition("@")[0]: choice for group, choice in choices.items()}
    train, rollout = halves.get("precision/train"), halves.get("precision/rollout")
    return None if train is None or rollout is None else (train, rollout)


def _others_differ(role: str, effect: str) -> None:
    @rule(
        f"{role}-differs-from-actor",
        "warning",
        setting="{engine.setting}.mixed_precision.param_dtype",
        problem=f"the {role} computes in {{engine.compute}}, the actor in {{actor.compute}}; {effect}.",
        allowed="{actor.compute}",
        remedy="Choose precision={actor.compute}, which sets them together.",
    )
    def differs(config: DictConfig, environment: Environment) -> Iterator[Case]:
        """verl does not pass the actor's `mixed_precision` on to reference and critic."""
        actor, *others = engines(config)
        for engine in others:
            if engine.role == role and engine.compute != actor.compute:
                yield {"engine": engine, "actor": actor}


_others_differ("ref", "the KL to the reference carries the difference on every token")
_others_differ("critic", "values come from another precision than the policy")


@rule(
    "half-weights",
    "warning",
    setting="{engine.setting}.model_dtype",
    problem="weights and RoPE's frequencies are rounded once, for good.",
    allowed="fp32",
    remedy="Set {engine.setting}.model_dtype=fp32.",
)
def half_weights(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The reference holds its weights in 16 bits."""
    for engine in engines(config):
        if engine.strategy in FSDP and engine.master in HALF and not engine.trains and not engine.ours:
            yield {"engine": engine}


@rule(
    "half-master-weights",
    setting="{engine.setting}.model_dtype",
    problem="master weights and Adam's moments are {engine.master} too: small updates round away{effect}.",
    allowed="fp32",
    remedy="Set {engine.setting}.model_dtype=fp32.",
)
def half_master_weights(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """`model_dtype` in 16 bits is the optimizer's dtype too, and rounds RoPE's frequencies."""
    for engine in engines(config):
        if not engine.half_master:
            continue
        lora = engine.role == "actor" and config.actor_rollout_ref.model.get("lora_rank")
        effect = ", and verl casts the LoRA adapters to it" if lora else ", and so do RoPE's frequencies"
        severity = "warning" if lora and engine.master == "bf16" else "error"
        yield {"engine": engine, "effect": effect, "severity": severity}


@rule(
    "adam-eps-underflow",
    setting="{role}.optim.override_optimizer_config.eps",
    problem="in FP16 it is zero: Adam divides by zero where a gradient vanished, and parameters become -inf.",
    allowed=f"> {FP16_ZERO:.1e}, or FP32 master weights",
    remedy="Set {engine.setting}.model_dtype=fp32.",
)
def eps_underflow(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Adam's eps is zero in FP16."""
    for engine in engines(config):
        override = (engine.optim or {}).get("override_optimizer_config") or {}
        eps = float(override.get("eps", ADAM_EPS))
        if engine.half_master and engine.master == "fp16" and eps <= FP16_ZERO:
            yield {"engine": engine, "role": engine.setting.rpartition(".")[0], "value": eps}


@rule(
    "vllm-refuses-fp16",
    setting=ROLLOUT_DTYPE,
    problem="vLLM does not run model_type={kind} in FP16 (numerical instability).",
    allowed="bfloat16 or float32 for this architecture",
    remedy="Choose precision=bf16 or fp32, or another model.",
)
def vllm_refuses_fp16(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """vLLM refuses FP16 for some architectures, minutes after Ray has started."""
    kind = environment.model.get("model_type")
    if (
        kind in VLLM_REFUSES_FP16
        and rollout_dtype(config) == "fp16"
        and config.actor_rollout_ref.rollout.name == "vllm"
    ):
        yield {"kind": kind}


@rule(
    "merged-lora-rounds",
    setting="{setting}",
    problem="weights travel in BF16, so that the {rollout} rollout computes with 8 bits of mantissa.",
    allowed="False, or this package's engine, which merges in FP32",
    remedy="Choose precision={rollout}, or set {setting}=False.",
)
def merged_lora_rounds(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl's own engine casts merged LoRA weights to BF16."""
    return (case for case in _rounded_on_the_way(config) if case["merged"])


@rule(
    "transport-rounds",
    setting="{setting}",
    problem="weights travel in BF16, so that the {rollout} rollout computes with 8 bits of mantissa.",
    allowed="naive",
    remedy="Set {setting}=naive.",
)
def transport_rounds(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Weights rounded to BF16 on their way bring BF16's gap back into an FP16 or FP32 rollout."""
    return (case for case in _rounded_on_the_way(config) if not case["merged"])


def _rounded_on_the_way(config: DictConfig) -> Iterator[dict]:
    dtype, source = transport_dtype(config)
    setting, _, value = source.partition(" ")[0].partition("=")
    # without a value it is BF16 master weights: said by half-master-weights
    if dtype == "bf16" and rollout_dtype(config) in ("fp16", "fp32") and value:
        merged = lora_is_merged(config) and setting.endswith("merge")
        yield {"setting": setting, "rollout": rollout_dtype(config), "merged": merged}


@rule(
    "megatron-fp16-overflow",
    setting="{engine.setting}.dtype",
    problem="at the first overflow of the dynamic loss scale verl raises NotImplementedError (Megatron optimizer step "
    "failed) and the run ends.",
    allowed="bfloat16 with Megatron",
    remedy="Train with model_engine=dp (FSDP) and precision=fp16, or choose bfloat16.",
)
def megatron_fp16(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl raises where Megatron reports an overflow, which a dynamic loss scale produces by design."""
    for engine in engines(config):
        if engine.strategy == "megatron" and engine.trains and engine.compute == "fp16":
            yield {"engine": engine}


@rule(
    "loss-scaling",
    "warning",
    setting="{setting}",
    problem="{effect}",
    allowed="an engine that scales there and saves the scale",
    remedy="See docs/precision.md, loss scaling.",
)
def loss_scaling_of_verl(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl's loss scaler is off on every device but CUDA, and is in no checkpoint."""
    if config.trainer.device != "cuda":
        effect = f"verl's loss scaler switches itself off on {config.trainer.device}: small gradients become zero."
    elif config.trainer.get("save_freq", -1) > 0:
        effect = "verl does not save the loss scale: after a resume it starts at 65536 again and skips steps."
    else:
        return
    for engine in engines(config):
        if engine.strategy in FSDP and not engine.ours and engine.trains and engine.compute == "fp16":
            yield {"setting": engine.source, "effect": effect, "value": "fp16"}


@rule(
    "export-rounds",
    "warning",
    setting="actor_rollout_ref.actor.checkpoint.save_contents",
    problem="verl writes hf_model with BF16 in its config: served as it is, the model has BF16's gap again.",
    allowed="contents without hf_model",
    remedy="Leave hf_model out, and export the saved model in FP16.",
)
def export_rounds(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl writes Hugging Face checkpoints with BF16 in their config; our engine writes what it computed in."""
    actor = engines(config)[0]
    contents = list(OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.save_contents") or [])
    verls_fp16 = actor.strategy in FSDP and not actor.ours and actor.compute == "fp16"
    if verls_fp16 and "hf_model" in contents and config.trainer.save_freq > 0:
        yield {"value": contents}


@rule(
    "rollout-quantised",
    "warning",
    setting="actor_rollout_ref.rollout.{key}",
    problem="the rollout computes in fewer bits than its dtype says; expect a mismatch far above FP16's.",
    allowed="null",
    remedy="Set it to null, or correct for it with estimator=grpo_seq_mis or pg_seq_tis.",
)
def kv_cache_or_weights_quantised(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """A quantised rollout computes another policy than the trainer, whatever its dtype says."""
    for key, value in (
        ("quantization", config.actor_rollout_ref.rollout.get("quantization")),
        ("engine_kwargs.vllm.kv_cache_dtype", engine_kwargs(config).get("kv_cache_dtype")),
    ):
        if value not in (None, "auto", "fp16", "bf16", "float16", "bfloat16"):
            yield {"key": key, "value": value}
