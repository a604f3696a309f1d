"""Rules of the dtypes: settings that are ignored, contradict each other, or lose precision without a word."""

from dataclasses import replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import HALF, short
from verl_precision.base.verl_config import (
    BACKEND,
    FSDP,
    engines,
    quantisations,
    rollout_dtype,
    sync_backend,
    transport_dtype,
)
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Faults, Severity, rule, told
from verl_precision.check.served_models import served_models
from verl_precision.integration.trainer.saving import saves

# `_FLOAT16_NOT_SUPPORTED_MODELS` in vllm/config/model.py of 0.28.0 (tests/check/rules/test_rules.py compares them);
# plamo2 was in it before.
VLLM_REFUSES_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
ADAM_EPS = 1e-8  # torch's default
FP16_ZERO = 2.0**-25  # Half of FP16's smallest subnormal, 2**-24: what is not above it rounds to zero.


@rule("dtype-ignored")
def dtype_ignored(config: DictConfig, environment: Environment) -> Faults:
    """verl documents `fsdp_config.dtype`, and its FSDP engine never reads it."""
    for engine in engines(config):
        said = short(engine.node.get("dtype", "bf16"))
        # bfloat16 is verl's default, so nobody need have written it; this package's engine refuses it by itself
        if engine.verls_fsdp and said not in ("bf16", engine.compute):
            yield told("dtype-ignored", engine=engine, said=said)


@rule("rollout-contradicts-actor", about="the dtype that vLLM would take")
def rollout_contradicts_actor(config: DictConfig, environment: Environment) -> Faults:
    """The rollout samples in another dtype than the actor trains in, and no preset asked for that."""
    actor, rollout = engines(config)[0].compute, rollout_dtype(config)
    if rollout == "auto":
        rollout = short(environment.model.get("dtype") or environment.model.get("torch_dtype") or "auto")
    if rollout == actor or (actor, rollout) == preset_dtypes(config):
        return
    severity: Severity = "warning" if rollout == "auto" else "error"
    effect = "every token's log-prob carries the difference"
    effect = "vLLM will decide from the model's files" if rollout == "auto" else effect
    yield told("rollout-contradicts-actor", severity=severity, actor=actor, effect=effect)


def preset_dtypes(config: DictConfig) -> tuple[str, str] | None:
    """Return the (actor, rollout) dtypes of the precision preset that was chosen, or None.

    A preset is made of two halves, and Hydra records which: no list of pairs is kept here. A value overridden after the
    choice differs from the preset's, and is then not what the preset asked for.
    """
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    halves = {group.partition("@")[0]: choice for group, choice in choices.items()}
    train, rollout = halves.get("precision/train"), halves.get("precision/rollout")
    return None if train is None or rollout is None else (train, rollout)


def _differs_from_actor(role: str, effect: str, config: DictConfig, environment: Environment) -> Faults:
    """verl does not pass the actor's `mixed_precision` on to reference and critic."""
    actor, *others = engines(config)
    for engine in others:
        if engine.role == role and engine.compute != actor.compute:
            yield told("differs-from-actor", engine=engine, role=role, actor=actor, effect=effect)


for _role, _effect in (
    ("ref", "the KL to the reference carries the difference on every token"),
    ("critic", "values come from another precision than the policy"),
):
    rule(f"{_role}-differs-from-actor", "warning")(partial(_differs_from_actor, _role, _effect))


@rule("half-weights", "warning")
def half_weights(config: DictConfig, environment: Environment) -> Faults:
    """The reference holds its weights in 16 bits, or gradients are summed in them."""
    for engine in engines(config):
        if engine.trains and engine.strategy in FSDP and engine.reduce in HALF:
            yield told("half-weights sums", engine=engine)
        if engine.verls_fsdp and engine.master in HALF and not engine.trains:
            yield told("half-weights weights", engine=engine)


@rule("half-master-weights")
def half_master_weights(config: DictConfig, environment: Environment) -> Faults:
    """`model_dtype` in 16 bits is the optimizer's dtype too, and rounds RoPE's frequencies.

    Runs train like that, so it is a warning; an error where a precision preset is chosen, which promises FP32. (What
    makes weights infinite is another rule: `adam-eps-underflow`.)
    """
    promised = bool(OmegaConf.select(config, "hydra.runtime.choices.precision"))
    for engine in engines(config):
        if not engine.half_master:
            continue
        lora = engine.role == "actor" and config.actor_rollout_ref.model.get("lora_rank")
        effect = f"verl casts the LoRA adapters to {engine.master}" if lora else "RoPE's frequencies are rounded"
        severity: Severity = "error" if promised and not (lora and engine.master == "bf16") else "warning"
        yield told("half-master-weights", severity=severity, engine=engine, effect=effect)


@rule("adam-eps-underflow")
def adam_eps_underflow(config: DictConfig, environment: Environment) -> Faults:
    """Adam's eps is zero in FP16."""
    for engine in engines(config):
        override = (engine.optim or {}).get("override_optimizer_config") or {}
        eps = float(override.get("eps", ADAM_EPS))
        if engine.half_master and engine.master == "fp16" and eps <= FP16_ZERO:
            setting = f"{engine.setting.rpartition('.')[0]}.optim.override_optimizer_config.eps"
            yield told("adam-eps-underflow", setting=setting, value=eps, zero=FP16_ZERO, engine=engine)


@rule("vllm-refuses-fp16", about="whether vLLM takes the model in FP16")
def vllm_refuses_fp16(config: DictConfig, environment: Environment) -> Faults:
    """vLLM refuses FP16 for some architectures, minutes after Ray has started."""
    if config.actor_rollout_ref.rollout.name != "vllm" or rollout_dtype(config) != "fp16":
        return
    if (kind := environment.model.get("model_type")) in VLLM_REFUSES_FP16:
        yield told("vllm-refuses-fp16", kind=kind)
    for served in served_models(config):
        kind = environment.served.get(served.named, {}).get("model_type")
        if kind in VLLM_REFUSES_FP16 and (served.engine, served.dtype) == ("vllm", "fp16"):
            remedy = f"Set {served.setting}.dtype=bfloat16, or name another model."
            yield replace(told("vllm-refuses-fp16", setting=f"{served.setting}.dtype", kind=kind), remedy=remedy)


@rule("merged-lora-rounds")
def merged_lora_rounds(config: DictConfig, environment: Environment) -> Faults:
    """verl's own engine casts merged LoRA weights to BF16."""
    setting, rollout = _rounded_by(config), rollout_dtype(config)
    if setting.endswith(".merge"):
        yield told("merged-lora-rounds", setting=setting, rollout=rollout)


@rule("transport-rounds")
def transport_rounds(config: DictConfig, environment: Environment) -> Faults:
    """Weights rounded to BF16 on their way bring BF16's gap back into an FP16 or FP32 rollout."""
    setting = _rounded_by(config)
    if setting == BACKEND:
        yield told("transport-rounds", setting=setting, rollout=rollout_dtype(config))


def _rounded_by(config: DictConfig) -> str:
    """Return the setting that rounds weights on their way to a more precise rollout; empty if there is none."""
    dtype, source = transport_dtype(config)
    setting, _, value = source.partition(" ")[0].partition("=")
    # without a value it is BF16 master weights, which are half-master-weights
    return setting if value and dtype == "bf16" and rollout_dtype(config) in ("fp16", "fp32") else ""


@rule("stochastic-rounding")
def stochastic_rounding(config: DictConfig, environment: Environment) -> Faults:
    """Only this package's engine rounds weights at random, from FP32 to 16 bits."""
    if OmegaConf.select(config, "weight_sync.rounding") != "stochastic":
        return
    actor, rollout = engines(config)[0], rollout_dtype(config)
    backend = sync_backend(config)
    if not (actor.our_fsdp and actor.master == "fp32"):
        yield told("stochastic-rounding engine", actor=actor)
    elif rollout not in HALF or config.actor_rollout_ref.rollout.get("quantization"):
        yield told("stochastic-rounding rollout", half=" or ".join(HALF), rollout=rollout)
    elif backend.startswith("delta"):
        yield told("stochastic-rounding transport", backend=backend)


@rule("megatron-fp16-overflow")
def megatron_fp16_overflow(config: DictConfig, environment: Environment) -> Faults:
    """verl raises where Megatron reports an overflow, which a dynamic loss scale produces by design."""
    for engine in engines(config):
        if engine.strategy == "megatron" and engine.trains and engine.compute == "fp16" and not engine.ours:
            yield told("megatron-fp16-overflow", engine=engine)


@rule("loss-scaling", "warning")
def loss_scaling_of_verl(config: DictConfig, environment: Environment) -> Faults:
    """verl's loss scaler is off on every device but CUDA, and is in no checkpoint."""
    trainer = config.trainer
    if trainer.device == "cuda" and not saves(config):
        return
    case = "after a resume" if trainer.device == "cuda" else "off"
    for engine in engines(config):
        if engine.verls_fsdp and engine.trains and engine.compute == "fp16":
            yield told(f"loss-scaling {case}", setting=engine.source, value="fp16", trainer=trainer)


@rule("fp32-head-unread")
def fp32_head_unread(config: DictConfig, environment: Environment) -> Faults:
    """Fused kernels take log-probs from the hidden states: the output head never runs."""
    actor, fused = engines(config)[0], config.actor_rollout_ref.model.get("use_fused_kernels")
    if fused and actor.our_fsdp and actor.node.get("fp32_output_head"):
        yield told("fp32-head-unread", actor=actor)


@rule("export-rounds", "warning")
def export_rounds(config: DictConfig, environment: Environment) -> Faults:
    """verl writes Hugging Face checkpoints with BF16 in their config; our engine writes what it computed in."""
    actor, setting = engines(config)[0], "actor_rollout_ref.actor.checkpoint.save_contents"
    exports = "hf_model" in names_in(config, setting) and saves(config)
    if exports and actor.verls_fsdp and actor.compute == "fp16":
        yield told("export-rounds", setting=setting)


@rule("rollout-quantised", "warning")
def rollout_quantised(config: DictConfig, environment: Environment) -> Faults:
    """A quantised rollout computes another policy than the trainer, whatever its dtype says."""
    for setting, value in quantisations(config).items():
        yield told("rollout-quantised", setting=setting, value=value)
