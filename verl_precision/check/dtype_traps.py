"""Traps of the dtypes: settings that are ignored, contradict each other, or lose precision without a word.

Pure functions of a composed config and, where needed, of the `config.json` of a local model.
"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.dtypes import (
    FSDP,
    HALF,
    Engine,
    engine_kwargs,
    engines,
    lora_is_merged,
    rollout_dtype,
    short,
    transport_dtype,
)
from verl_precision.check.fault import Environment, Fault
from verl_precision.check.local_model import model_config

ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"
# `_FLOAT16_NOT_SUPPORTED_MODELS` in vllm/config/model.py of 0.28.0 (compared by tests/check/test_traps.py); plamo2 was
# in it before.
VLLM_REFUSES_FP16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
ADAM_EPS = 1e-8  # torch's default
# Half of FP16's smallest subnormal, 2**-24: what is not above it rounds to zero.
FP16_ZERO = 2.0**-25


def dtype_ignored(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl documents `fsdp_config.dtype`; its FSDP engine never reads it."""
    for engine in engines(config):
        said = short(engine.node.get("dtype", "bf16"))
        # bfloat16 is verl's default, so that nobody need have said it
        if engine.strategy in FSDP and said not in ("bf16", engine.compute):
            yield Fault(
                "dtype-ignored",
                "error",
                f"{engine.setting}.dtype",
                engine.node.dtype,
                f"verl's FSDP engine never reads it; the {engine.role} computes in {engine.compute}, from "
                f"{engine.source}.",
                f"the dtype of mixed_precision.param_dtype ({engine.compute})",
                f"Choose precision={said}, or set {engine.setting}.mixed_precision.param_dtype={said}.",
            )


def rollout_contradicts(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The rollout samples in another dtype than the actor trains in, and no preset asked for that."""
    actor, rollout = engines(config)[0].compute, rollout_dtype(config)
    if rollout == "auto":
        described = model_config(config)
        rollout = short(described.get("dtype") or described.get("torch_dtype") or "auto")
    if rollout == actor or (actor, rollout) == asked_pair(config):
        return
    known = rollout != "auto"
    yield Fault(
        "rollout-contradicts-actor",
        "error" if known else "warning",
        ROLLOUT_DTYPE,
        config.actor_rollout_ref.rollout.dtype,
        f"the actor computes in {actor}: "
        + ("every token's log-prob carries the difference." if known else "vLLM will decide from the model's files."),
        f"{actor}, or a precision preset that names both",
        f"Choose precision={actor}, or a preset of precision/ that names the pair, as <train>_train_<rollout>_rollout.",
    )


def asked_pair(config: DictConfig) -> tuple[str, str] | None:
    """Return the (actor, rollout) dtypes of the precision preset that was chosen, or None.

    A preset is made of two halves, and Hydra records which: no list of pairs is kept here. A value overridden after the
    choice differs from the preset's, and is then not what the preset asked for.
    """
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    halves = {group.partition("@")[0]: choice for group, choice in choices.items()}
    train, rollout = halves.get("precision/train"), halves.get("precision/rollout")
    return None if train is None or rollout is None else (train, rollout)


def others_differ(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl does not pass the actor's `mixed_precision` on to reference and critic."""
    actor, *others = engines(config)
    for engine in others:
        if engine.compute != actor.compute:
            effect = (
                "the KL to the reference carries the difference on every token"
                if engine.role == "ref"
                else ("values come from another precision than the policy")
            )
            yield Fault(
                f"{engine.role}-differs-from-actor",
                "warning",
                f"{engine.setting}.mixed_precision.param_dtype",
                (engine.node.get("mixed_precision") or {}).get("param_dtype"),
                f"the {engine.role} computes in {engine.compute}, the actor in {actor.compute}; {effect}.",
                actor.compute,
                f"Choose precision={actor.compute}, which sets them together.",
            )


def half_master_weights(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """`model_dtype` in 16 bits is the optimizer's dtype too, and rounds RoPE's frequencies."""
    for engine in engines(config):
        if engine.strategy not in FSDP or engine.master not in HALF:
            continue
        setting = f"{engine.setting}.model_dtype"
        if not engine.trains:
            yield _fault_of_master(
                "half-weights", "warning", engine, setting, "weights and RoPE's frequencies are rounded once, for good."
            )
        elif not (engine.optim or {}).get("optimizer_impl", "torch.optim").startswith("torch.optim"):
            continue  # an optimizer made for it, such as torchao's with stochastic rounding
        else:
            lora = engine.role == "actor" and config.actor_rollout_ref.model.get("lora_rank")
            yield _fault_of_master(
                "half-master-weights",
                "warning" if lora and engine.master == "bf16" else "error",
                engine,
                setting,
                f"master weights and Adam's moments are {engine.master} too: small updates round away"
                + (", and verl casts the LoRA adapters to it." if lora else ", and so do RoPE's frequencies."),
            )
            yield from _eps_underflow(engine)


def _fault_of_master(name: str, severity, engine: Engine, setting: str, problem: str) -> Fault:
    return Fault(name, severity, setting, engine.node.model_dtype, problem, "fp32", f"Set {setting}=fp32.")


def _eps_underflow(engine: Engine) -> Iterator[Fault]:
    override = (engine.optim or {}).get("override_optimizer_config") or {}
    eps = float(override.get("eps", ADAM_EPS))
    if engine.master == "fp16" and eps <= FP16_ZERO:
        role = engine.setting.rpartition(".")[0]
        yield Fault(
            "adam-eps-underflow",
            "error",
            f"{role}.optim.override_optimizer_config.eps",
            eps,
            "in FP16 it is zero: Adam divides by zero where a gradient vanished, and parameters become -inf.",
            f"> {FP16_ZERO:.1e}, or FP32 master weights",
            f"Set {engine.setting}.model_dtype=fp32.",
        )


def vllm_refuses_fp16(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """vLLM refuses FP16 for some architectures, minutes after Ray has started."""
    if rollout_dtype(config) != "fp16" or config.actor_rollout_ref.rollout.name != "vllm":
        return
    kind = model_config(config).get("model_type")
    if kind in VLLM_REFUSES_FP16:
        yield Fault(
            "vllm-refuses-fp16",
            "error",
            ROLLOUT_DTYPE,
            config.actor_rollout_ref.rollout.dtype,
            f"vLLM does not run model_type={kind} in FP16 (numerical instability).",
            "bfloat16 or float32 for this architecture",
            "Choose precision=bf16 or fp32, or another model.",
        )


def transport_rounds(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Weights rounded to BF16 on their way bring BF16's gap back into an FP16 or FP32 rollout."""
    dtype, source = transport_dtype(config)
    rollout = rollout_dtype(config)
    if dtype != "bf16" or rollout not in ("fp16", "fp32"):
        return
    setting, _, value = source.partition(" ")[0].partition("=")
    if not value:  # BF16 master weights: said by half-master-weights
        return
    merged = lora_is_merged(config)
    yield Fault(
        "merged-lora-rounds" if merged and setting.endswith("merge") else "transport-rounds",
        "error",
        setting,
        value,
        f"weights travel in BF16, so that the {rollout} rollout computes with 8 bits of mantissa.",
        "False, or this package's engine, which merges in FP32" if merged else "naive",
        f"Choose precision={rollout}, or set {setting}=False." if merged else f"Set {setting}=naive.",
    )


def megatron_fp16(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl raises where Megatron reports an overflow, which a dynamic loss scale produces by design."""
    for engine in engines(config):
        if engine.strategy == "megatron" and engine.trains and engine.compute == "fp16":
            yield Fault(
                "megatron-fp16-overflow",
                "error",
                f"{engine.setting}.dtype",
                engine.node.dtype,
                "at the first overflow of the dynamic loss scale verl raises NotImplementedError (Megatron optimizer "
                "step failed) and the run ends.",
                "bfloat16 with Megatron",
                "Train with model_engine=dp (FSDP) and precision=fp16, or choose bfloat16.",
            )


def loss_scaling_of_verl(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's loss scaler is off on every device but CUDA, and is in no checkpoint."""
    for engine in engines(config):
        if engine.strategy not in FSDP or engine.ours or not engine.trains or engine.compute != "fp16":
            continue
        if config.trainer.device != "cuda":
            problem = f"verl's loss scaler switches itself off on {config.trainer.device}: small gradients become zero."
        elif config.trainer.get("save_freq", -1) > 0:
            problem = "verl does not save the loss scale: after a resume it starts at 65536 again and skips steps."
        else:
            continue
        yield Fault(
            "loss-scaling",
            "warning",
            engine.source,
            "fp16",
            problem,
            "an engine that scales there and saves the scale",
            "See docs/precision.md, loss scaling.",
        )


def export_rounds(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl writes Hugging Face checkpoints with BF16 in their config; our engine writes what it computed in."""
    actor = engines(config)[0]
    contents = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.save_contents") or []
    if actor.ours:
        return
    if "hf_model" in contents and actor.strategy in FSDP and actor.compute == "fp16" and config.trainer.save_freq > 0:
        yield Fault(
            "export-rounds",
            "warning",
            "actor_rollout_ref.actor.checkpoint.save_contents",
            list(contents),
            "verl writes hf_model with BF16 in its config: served as it is, the model has BF16's gap again.",
            "contents without hf_model",
            "Leave hf_model out, and export the saved model in FP16.",
        )


def kv_cache_or_weights_quantised(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A quantised rollout computes another policy than the trainer, whatever its dtype says."""
    rollout = config.actor_rollout_ref.rollout
    kwargs = engine_kwargs(config)
    for key, value in (
        ("quantization", rollout.get("quantization")),
        ("engine_kwargs.vllm.kv_cache_dtype", kwargs.get("kv_cache_dtype")),
    ):
        if value not in (None, "auto", "fp16", "bf16", "float16", "bfloat16"):
            yield Fault(
                "rollout-quantised",
                "warning",
                f"actor_rollout_ref.rollout.{key}",
                value,
                "the rollout computes in fewer bits than its dtype says; expect a mismatch far above FP16's.",
                "null",
                "Set it to null, or correct for it with estimator=grpo_seq_mis or pg_seq_tis.",
            )


TRAPS = (
    dtype_ignored,
    rollout_contradicts,
    others_differ,
    half_master_weights,
    vllm_refuses_fp16,
    transport_rounds,
    megatron_fp16,
    loss_scaling_of_verl,
    export_rounds,
    kv_cache_or_weights_quantised,
)
