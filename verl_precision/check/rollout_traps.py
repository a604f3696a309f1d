"""Traps of the rollout: log-probs, truncated sampling, vLLM. Pure functions of a composed config and environment."""

from collections.abc import Iterator

from omegaconf import DictConfig
from packaging.version import Version

from verl_precision.check.dtypes import HALF, engine_kwargs, engines, uses_adapter
from verl_precision.check.fault import Environment, Fault
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.versions import loads_adapters

ROLLOUT = "actor_rollout_ref.rollout"
# vLLM pull request 36318, merged in March 2026, made cascade attention opt-in.
CASCADE_OFF_SINCE = Version("0.18.0")
CASCADE_GPUS = ("A100", "A800")


def raw_logprobs(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Raw log-probs are taken before temperature and truncation: another distribution than the one sampled from."""
    rollout = config.actor_rollout_ref.rollout
    mode = engine_kwargs(config).get("logprobs_mode", rollout.get("logprobs_mode"))
    if mode == "processed_logprobs" or not _needs_logprobs(config):
        return
    changed = [f"{key}={rollout[key]}" for key in ("temperature", "top_p", "top_k") if _is_set(rollout, key)]
    harmless = mode == "raw_logprobs" and not changed
    yield Fault(
        "raw-logprobs",
        "warning" if harmless else "error",
        f"{ROLLOUT}.logprobs_mode",
        mode,
        "the rollout's log-probs are compared with the trainer's as those of the policy it sampled from, "
        + (f"and raw ones ignore {', '.join(changed)}." if changed else "and these are not, by definition."),
        "processed_logprobs",
        f"Set {ROLLOUT}.logprobs_mode=processed_logprobs.",
    )


def truncated_sampling(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """With top_p or top_k the rollout's log-probs are renormalised over what is left; the trainer's are not."""
    rollout = config.actor_rollout_ref.rollout
    for key, allowed in (("top_p", "1.0"), ("top_k", "-1")):
        if not _is_set(rollout, key) or not _needs_logprobs(config):
            continue
        ratios = importance_ratios(config)
        yield Fault(
            "truncated-sampling",
            "error" if ratios else "warning",
            f"{ROLLOUT}.{key}",
            rollout[key],
            "the rollout renormalises over the tokens it kept, the trainer over the whole vocabulary: "
            + (f"{ratios} divides one by the other." if ratios else "the mismatch metrics show the truncation."),
            allowed,
            f"Set {ROLLOUT}.{key}={allowed}"
            + ("." if ratios else ", or do not read the mismatch metrics as precision."),
        )


def temperature_in_half(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl divides logits by the temperature in their 16-bit dtype, vLLM in FP32."""
    actor = engines(config)[0]
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature != 1 and actor.compute in HALF and not actor.ours and _needs_logprobs(config):
        yield Fault(
            "temperature-in-half",
            "warning",
            f"{ROLLOUT}.temperature",
            temperature,
            f"verl divides {actor.compute} logits by it in {actor.compute}, vLLM divides in FP32: one more rounding.",
            "1.0",
            f"Set {ROLLOUT}.temperature=1.0.",
        )


def logprobs_missing(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Without the rollout's log-probs there is neither a ratio nor a mismatch to measure."""
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    reason = importance_ratios(config)
    mode = str((config.trainer.get("v1") or {}).get("trainer_mode", ""))
    if reason is None and not mode.startswith("vp_"):
        return
    yield Fault(
        "logprobs-missing",
        "error" if reason else "warning",
        f"{ROLLOUT}.calculate_log_probs",
        False,
        f"{reason} needs the rollout's log-probs." if reason else f"trainer_mode={mode} has no mismatch to report.",
        "True",
        f"Set {ROLLOUT}.calculate_log_probs=True.",
    )


def cascade_attention(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Cascade attention of older vLLM raises the mismatch on A100; vLLM has turned it off by default."""
    if config.actor_rollout_ref.rollout.name != "vllm" or environment.vllm is None:
        return
    gpu = next((name for name in environment.gpus if any(model in name for model in CASCADE_GPUS)), None)
    off = engine_kwargs(config).get("disable_cascade_attn", Version(environment.vllm) >= CASCADE_OFF_SINCE)
    if gpu is not None and not off:
        yield Fault(
            "cascade-attention",
            "warning",
            f"{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn",
            False,
            f"vLLM {environment.vllm} uses cascade attention when requests share a prefix, as those of one prompt do; "
            f"on {gpu} it has been reported to raise the mismatch by orders of magnitude.",
            "True",
            f"Set +{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True.",
        )


def adapter_not_loadable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl calls a method of vLLM to load LoRA adapters that vLLM has since renamed."""
    vllm = environment.vllm
    if config.actor_rollout_ref.rollout.name != "vllm" or vllm is None or loads_adapters(vllm):
        return
    if uses_adapter(config):
        yield Fault(
            "adapter-not-loadable",
            "error",
            "actor_rollout_ref.model.lora.merge",
            False,
            f"verl 0.9.1 cannot load a LoRA adapter into vLLM {vllm}: it calls WeightsMapper.get_unstacked_mapper, "
            "which vLLM has not had since 0.29, and the first weight sync raises AttributeError.",
            "vLLM < 0.29, or True",
            "Install an older vLLM, or set actor_rollout_ref.model.lora.merge=True: the rollout then gets merged "
            "weights, in FP32 with a precision preset, and in BF16 with verl's own FSDP engine, which merges in BF16.",
        )


def importance_ratios(config: DictConfig) -> str | None:
    """Return the setting that makes ratios between trainer and rollout, or None."""
    correction = config.algorithm.get("rollout_correction") or {}
    for key in ("rollout_is", "rollout_rs", "bypass_mode"):
        if correction.get(key):
            return f"algorithm.rollout_correction.{key}={correction[key]}"
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if loss == "bypass_mode" or (loss in POLICY_LOSSES and "rollout_log_probs" in POLICY_LOSSES[loss].parameters):
        return f"loss_mode={loss}"
    return None


def _needs_logprobs(config: DictConfig) -> bool:
    return bool(config.actor_rollout_ref.rollout.calculate_log_probs or importance_ratios(config))


def _is_set(rollout: DictConfig, key: str) -> bool:
    return rollout.get(key) not in {"temperature": (1,), "top_p": (1,), "top_k": (-1, 0)}[key]


TRAPS = (
    raw_logprobs,
    truncated_sampling,
    temperature_in_half,
    logprobs_missing,
    cascade_attention,
    adapter_not_loadable,
)
