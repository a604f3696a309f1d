"""Rules of the dtypes: settings that are ignored, contradict each other, or lose precision without a word."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import HALF, short
from verl_precision.base.verl_config import BACKEND, ROLLOUT, engines, quantisations, rollout_dtype, transport_dtype
from verl_precision.check.models import served_models
from verl_precision.check.rules.rule import Environment, Fault, Severity, rule
from verl_precision.integration.trainer.saving import saves

ADAM_EPS = 1e-8  # torch's default
FP16_ZERO = 2.0**-25  # half of FP16's smallest subnormal: numbers up to it round to zero
# `_FLOAT16_NOT_SUPPORTED_MODELS` in vllm/config/model.py of 0.28.0 (tests/check/rules/test_rules.py compares them);
# the list of older releases has plamo2.
VLLM_REFUSES_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")


@rule("dtype-ignored")
def dtype_ignored(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl documents `fsdp_config.dtype`, and its FSDP engine never reads it."""
    for engine in engines(config):
        said = short(engine.node.get("dtype", "bf16"))
        # bfloat16 is verl's default, so perhaps no user has set it; this package's engine refuses this itself
        if engine.verls_fsdp and said not in ("bf16", engine.compute):
            yield Fault.worded("dtype-ignored", f"{engine.setting}.dtype", engine=engine, said=said)


@rule("rollout-contradicts-actor")
def rollout_contradicts_actor(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The rollout samples in another dtype than the actor trains in, and no preset names this pair of dtypes."""
    actor, rollout = engines(config)[0].compute, rollout_dtype(config)
    if rollout == "auto":
        rollout = short(environment.model.get("dtype") or environment.model.get("torch_dtype") or "auto")
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    halves = {group.partition("@")[0]: choice for group, choice in choices.items()}
    if rollout == actor or (actor, rollout) == (halves.get("precision/train"), halves.get("precision/rollout")):
        return
    if rollout == "auto":
        yield Fault.worded("rollout-contradicts-actor/auto", f"{ROLLOUT}.dtype", actor=actor, severity="warning")
    else:
        yield Fault.worded("rollout-contradicts-actor", f"{ROLLOUT}.dtype", actor=actor)


@rule("differs-from-actor", "warning")
def differs_from_actor(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl does not pass the actor's `mixed_precision` on to reference and critic."""
    actor, *others = engines(config)
    for engine in others:
        if engine.compute != actor.compute:
            setting = f"{engine.setting}.mixed_precision.param_dtype"
            yield Fault.worded(f"differs-from-actor/{engine.role}", setting, engine=engine, actor=actor)


@rule("half-weights", "warning")
def half_weights(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The reference holds its weights in 16 bits, or gradients are summed in 16 bits."""
    for engine in engines(config):
        if engine.trains and (engine.our_fsdp or engine.verls_fsdp) and engine.reduce in HALF:
            setting = f"{engine.setting}.mixed_precision.reduce_dtype"
            yield Fault(setting, "sums of gradients over ranks are rounded to 16 bits", "fp32")
        if engine.verls_fsdp and engine.master in HALF and not engine.trains:
            problem = "weights and RoPE's frequencies are rounded to 16 bits permanently"
            yield Fault(f"{engine.setting}.model_dtype", problem, "fp32")


@rule("half-master-weights")
def half_master_weights(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """`model_dtype` in 16 bits is the optimizer's dtype too. Runs train like that; a precision preset promises FP32."""
    promised = bool(OmegaConf.select(config, "hydra.runtime.choices.precision"))
    for engine in engines(config):
        if not engine.half_master:
            continue
        lora = engine.role == "actor" and config.actor_rollout_ref.model.get("lora_rank")
        effect = f"verl casts the LoRA adapters to {engine.master}" if lora else "RoPE's frequencies are rounded"
        eps = OmegaConf.select(engine.optim or DictConfig({}), "override_optimizer_config.eps", default=ADAM_EPS)
        if vanishes := engine.master == "fp16" and eps <= FP16_ZERO:
            effect = f"Adam's eps of {eps:g} is zero in this dtype: a weight becomes -inf when its gradient is zero"
        severity: Severity = "error" if vanishes or (promised and not (lora and engine.master == "bf16")) else "warning"
        problem = f"master weights and Adam's moments are {engine.master} too: small updates are lost, and {effect}"
        yield Fault(f"{engine.setting}.model_dtype", problem, "fp32", severity=severity)


@rule("vllm-refuses-fp16")
def vllm_refuses_fp16(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """vLLM refuses FP16 for some architectures, minutes after Ray has started."""
    if config.actor_rollout_ref.rollout.name != "vllm" or rollout_dtype(config) != "fp16":
        return
    asked = {f"{ROLLOUT}.dtype": ("policy", environment.model)}
    for served in served_models(config):
        if (served.engine, served.dtype) == ("vllm", "fp16"):
            asked[f"{served.setting}.dtype"] = "served model", environment.served.get(served.named, {})
    for setting, (whose, model) in asked.items():
        if (kind := model.get("model_type")) in VLLM_REFUSES_FP16:
            yield Fault.worded(f"vllm-refuses-fp16/{whose}", setting, kind=kind)


@rule("transport-rounds")
def transport_rounds(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Weights rounded to BF16 on their way bring BF16's gap back into an FP16 or FP32 rollout.

    Some checkpoint engines round, and verl's own FSDP engine rounds merged LoRA weights.
    """
    (dtype, source), rollout = transport_dtype(config), rollout_dtype(config)
    setting, _, value = source.partition(" ")[0].partition("=")
    # without a value the cause is BF16 master weights: rule half-master-weights
    if not value or dtype != "bf16" or rollout not in ("fp16", "fp32"):
        return
    where = "checkpoint engine" if setting == BACKEND else "merged weights"
    yield Fault.worded(f"transport-rounds/{where}", setting, rollout=rollout)


@rule("megatron-fp16-overflow")
def megatron_fp16_overflow(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl raises where Megatron reports an overflow, which a dynamic loss scale produces by design."""
    for engine in engines(config):
        if engine.strategy == "megatron" and engine.trains and engine.compute == "fp16" and not engine.ours:
            yield Fault.worded("megatron-fp16-overflow", f"{engine.setting}.dtype")


@rule("loss-scaling", "warning")
def loss_scaling_of_verl(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's loss scaler is off on every device but CUDA, and is in no checkpoint."""
    device = config.trainer.device
    if device == "cuda" and not saves(config):
        return
    lost = "not saved" if device == "cuda" else "switched off"
    for engine in engines(config):
        if engine.verls_fsdp and engine.trains and engine.compute == "fp16":
            yield Fault.worded(f"loss-scaling/{lost}", engine.source, value="fp16", device=device)


@rule("rollout-quantised", "warning")
def rollout_quantised(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A quantised rollout computes another policy than the trainer, whatever its dtype says."""
    for setting, value in quantisations(config).items():
        yield Fault.worded("rollout-quantised", setting, value=value)
