"""Rules of the dtypes: settings that are ignored, contradict each other, or lose precision without a word."""

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
from verl_precision.check.rules.rule import Environment, Fault, Faults, Severity, rule
from verl_precision.integration.trainer.saving import saves

ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"
# `_FLOAT16_NOT_SUPPORTED_MODELS` in vllm/config/model.py of 0.28.0 (tests/check/rules/test_rules.py compares them);
# plamo2 was in it before.
VLLM_REFUSES_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
ADAM_EPS = 1e-8  # torch's default
FP16_ZERO = 2.0**-25  # Half of FP16's smallest subnormal, 2**-24: what is not above it rounds to zero.
TRAVEL_ROUNDED = "weights travel in BF16, so the {} rollout computes with 8 bits of mantissa"


@rule("dtype-ignored")
def dtype_ignored(config: DictConfig, environment: Environment) -> Faults:
    """verl documents `fsdp_config.dtype`, and its FSDP engine never reads it."""
    for engine in engines(config):
        said = short(engine.node.get("dtype", "bf16"))
        # bfloat16 is verl's default, so nobody need have written it; this package's engine refuses it by itself
        if engine.verls_fsdp and said not in ("bf16", engine.compute):
            problem = f"verl's FSDP engine reads {engine.source} instead, and computes in {engine.compute}"
            allowed = f"{engine.compute}, as mixed_precision.param_dtype"
            remedy = f"Choose precision={said}, or set {engine.setting}.mixed_precision.param_dtype={said}."
            yield Fault(setting=f"{engine.setting}.dtype", problem=problem, allowed=allowed, remedy=remedy)


@rule("rollout-contradicts-actor")
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
    problem, allowed = f"the actor computes in {actor}: {effect}", f"{actor}, or a precision preset that names both"
    remedy = f"Choose precision={actor}, or a preset that names the pair, as <train>_train_<rollout>_rollout."
    yield Fault("", severity, ROLLOUT_DTYPE, None, problem, allowed, remedy)


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
            setting = f"{engine.setting}.mixed_precision.param_dtype"
            problem = f"the {role} computes in {engine.compute}, the actor in {actor.compute}; {effect}"
            remedy = f"Choose precision={actor.compute}, which sets them together."
            yield Fault(setting=setting, problem=problem, allowed=actor.compute, remedy=remedy)


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
            setting = f"{engine.setting}.mixed_precision.reduce_dtype"
            yield Fault(setting=setting, problem="sums of gradients over ranks are rounded to 16 bits", allowed="fp32")
        if engine.verls_fsdp and engine.master in HALF and not engine.trains:
            problem = "weights and RoPE's frequencies are rounded to 16 bits once and for all"
            yield Fault(setting=f"{engine.setting}.model_dtype", problem=problem, allowed="fp32")


@rule("half-master-weights")
def half_master_weights(config: DictConfig, environment: Environment) -> Faults:
    """`model_dtype` in 16 bits is the optimizer's dtype too, and rounds RoPE's frequencies."""
    for engine in engines(config):
        if not engine.half_master:
            continue
        lora = engine.role == "actor" and config.actor_rollout_ref.model.get("lora_rank")
        effect = f"verl casts the LoRA adapters to {engine.master}" if lora else "RoPE's frequencies are rounded"
        severity: Severity = "warning" if lora and engine.master == "bf16" else "error"
        problem = f"master weights and Adam's moments are {engine.master} too: small updates are lost, and {effect}"
        yield Fault(severity=severity, setting=f"{engine.setting}.model_dtype", problem=problem, allowed="fp32")


@rule("adam-eps-underflow")
def adam_eps_underflow(config: DictConfig, environment: Environment) -> Faults:
    """Adam's eps is zero in FP16."""
    for engine in engines(config):
        override = (engine.optim or {}).get("override_optimizer_config") or {}
        eps = float(override.get("eps", ADAM_EPS))
        if engine.half_master and engine.master == "fp16" and eps <= FP16_ZERO:
            setting = f"{engine.setting.rpartition('.')[0]}.optim.override_optimizer_config.eps"
            problem = "it is zero in FP16: Adam divides by zero where a gradient vanished, and weights become -inf"
            allowed, remedy = f"> {FP16_ZERO:.1e}, or FP32 master weights", f"Set {engine.setting}.model_dtype=fp32."
            yield Fault(setting=setting, value=eps, problem=problem, allowed=allowed, remedy=remedy)


@rule("vllm-refuses-fp16")
def vllm_refuses_fp16(config: DictConfig, environment: Environment) -> Faults:
    """vLLM refuses FP16 for some architectures, minutes after Ray has started."""
    kind, engine = environment.model.get("model_type"), config.actor_rollout_ref.rollout.name
    if kind in VLLM_REFUSES_FP16 and engine == "vllm" and rollout_dtype(config) == "fp16":
        problem = f"vLLM does not run model_type={kind} in FP16 (numerical instability)"
        allowed = "bfloat16 or float32 for this architecture"
        remedy = "Choose precision=bf16 or fp32, or another model."
        yield Fault(setting=ROLLOUT_DTYPE, problem=problem, allowed=allowed, remedy=remedy)


@rule("merged-lora-rounds")
def merged_lora_rounds(config: DictConfig, environment: Environment) -> Faults:
    """verl's own engine casts merged LoRA weights to BF16."""
    setting, rollout = _rounded_by(config), rollout_dtype(config)
    if setting.endswith(".merge"):
        allowed = "False, or this package's engine, which merges in FP32"
        remedy = f"Choose precision={rollout}, or set {setting}=False."
        yield Fault(setting=setting, problem=TRAVEL_ROUNDED.format(rollout), allowed=allowed, remedy=remedy)


@rule("transport-rounds")
def transport_rounds(config: DictConfig, environment: Environment) -> Faults:
    """Weights rounded to BF16 on their way bring BF16's gap back into an FP16 or FP32 rollout."""
    setting = _rounded_by(config)
    if setting == BACKEND:
        remedy = f"Set {BACKEND}=nccl; naive is for trainers that share the rollout's GPUs."
        problem = TRAVEL_ROUNDED.format(rollout_dtype(config))
        yield Fault(setting=setting, problem=problem, allowed="naive, nccl or nixl", remedy=remedy)


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
    if not (actor.ours and actor.master == "fp32"):
        problem = f"the actor is verl's own engine, or holds its weights in {actor.master}: nothing would be rounded"
        remedy = "Choose a precision preset (precision=fp32_train_bf16_rollout), or set weight_sync.rounding=nearest."
    elif rollout not in HALF or config.actor_rollout_ref.rollout.get("quantization"):
        problem = f"weights are rounded to {' or '.join(HALF)}, and the rollout is quantised or holds {rollout}"
        remedy = f"Set {ROLLOUT_DTYPE} to bfloat16 or float16, or weight_sync.rounding=nearest."
    elif backend.startswith("delta"):
        problem = f"checkpoint_engine.backend={backend} sends differences of weights that verl rounds by itself"
        remedy = "Choose another backend, or set weight_sync.rounding=nearest."
    else:
        return
    yield Fault(setting="weight_sync.rounding", problem=problem, allowed="nearest here", remedy=remedy)


@rule("megatron-fp16-overflow")
def megatron_fp16_overflow(config: DictConfig, environment: Environment) -> Faults:
    """verl raises where Megatron reports an overflow, which a dynamic loss scale produces by design."""
    for engine in engines(config):
        if engine.strategy == "megatron" and engine.trains and engine.compute == "fp16":
            setting = f"{engine.setting}.dtype"
            problem = "at the first overflow of the loss scale verl raises NotImplementedError, and the run ends"
            remedy = "Train with model_engine=dp (FSDP) and precision=fp16, or choose bfloat16."
            yield Fault(setting=setting, problem=problem, allowed="bfloat16 with Megatron", remedy=remedy)


@rule("loss-scaling", "warning")
def loss_scaling_of_verl(config: DictConfig, environment: Environment) -> Faults:
    """verl's loss scaler is off on every device but CUDA, and is in no checkpoint."""
    trainer = config.trainer
    if trainer.device != "cuda":
        effect = f"verl's loss scaler switches itself off on {trainer.device}: small gradients become zero"
    elif saves(config):
        effect = "verl does not save the loss scale: after a resume it starts at 65536 again and skips steps"
    else:
        return
    for engine in engines(config):
        if engine.verls_fsdp and engine.trains and engine.compute == "fp16":
            remedy, allowed = "See docs/precision.md, loss scaling.", "an engine that scales there and saves the scale"
            yield Fault(setting=engine.source, value="fp16", problem=effect, allowed=allowed, remedy=remedy)


@rule("fp32-head-unread")
def fp32_head_unread(config: DictConfig, environment: Environment) -> Faults:
    """Fused kernels take log-probs from the hidden states: the output head never runs."""
    actor, fused = engines(config)[0], config.actor_rollout_ref.model.get("use_fused_kernels")
    if fused and actor.ours and actor.node.get("fp32_output_head"):
        setting, remedy = f"{actor.setting}.fp32_output_head", "Set actor_rollout_ref.model.use_fused_kernels=False."
        problem = "fused kernels take log-probs from the hidden states and never call the output head"
        yield Fault(setting=setting, problem=problem, allowed="False with use_fused_kernels=True", remedy=remedy)


@rule("export-rounds", "warning")
def export_rounds(config: DictConfig, environment: Environment) -> Faults:
    """verl writes Hugging Face checkpoints with BF16 in their config; our engine writes what it computed in."""
    actor, setting = engines(config)[0], "actor_rollout_ref.actor.checkpoint.save_contents"
    exports = "hf_model" in names_in(config, setting) and saves(config)
    if exports and actor.verls_fsdp and actor.compute == "fp16":
        problem = "verl writes hf_model with BF16 in its config: served as it is, the model has BF16's gap again"
        remedy = "Leave hf_model out, and write the checkpoint with: verl-precision export CHECKPOINT --dtype fp16."
        yield Fault(setting=setting, problem=problem, allowed="contents without hf_model", remedy=remedy)


@rule("rollout-quantised", "warning")
def rollout_quantised(config: DictConfig, environment: Environment) -> Faults:
    """A quantised rollout computes another policy than the trainer, whatever its dtype says."""
    for setting, value in quantisations(config).items():
        problem = "the rollout computes in fewer bits than its dtype says; expect a mismatch far above FP16's"
        remedy = "Set it to null, or correct for it with estimator=grpo_seq_mis or pg_seq_tis."
        yield Fault(setting=setting, value=value, problem=problem, allowed="null", remedy=remedy)
