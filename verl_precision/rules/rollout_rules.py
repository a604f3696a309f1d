"""Rules of the rollout: log-probs, truncated sampling, what the installed vLLM does."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.rules.dtypes import HALF, engine_kwargs, engines, uses_adapter
from verl_precision.rules.rule import Case, Environment, rule
from verl_precision.versions import loads_adapters

ROLLOUT = "actor_rollout_ref.rollout"
# vLLM pull request 36318, merged in March 2026, made cascade attention opt-in.
CASCADE_OFF_SINCE = Version("0.18.0")
CASCADE_GPUS = ("A100", "A800")


@rule(
    "raw-logprobs",
    setting=f"{ROLLOUT}.logprobs_mode",
    problem="the rollout's log-probs are compared with the trainer's as those of the policy it sampled from, {effect}.",
    allowed="processed_logprobs",
    remedy=f"Set {ROLLOUT}.logprobs_mode=processed_logprobs.",
)
def raw_logprobs(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Raw log-probs are taken before temperature and truncation: another distribution than the one sampled from."""
    rollout = config.actor_rollout_ref.rollout
    mode = engine_kwargs(config).get("logprobs_mode", rollout.get("logprobs_mode"))
    if mode == "processed_logprobs" or not _needs_logprobs(config):
        return
    changed = [f"{key}={rollout[key]}" for key in ("temperature", "top_p", "top_k") if _is_set(rollout, key)]
    effect = f"and raw ones ignore {', '.join(changed)}" if changed else "and these are not, by definition"
    harmless = mode == "raw_logprobs" and not changed
    yield {"value": mode, "effect": effect, "severity": "warning" if harmless else "error"}


@rule(
    "truncated-sampling",
    setting=ROLLOUT + ".{key}",
    problem="the rollout renormalises over the tokens it kept, the trainer over the whole vocabulary: {effect}.",
    allowed="{allowed}",
    remedy="Set " + ROLLOUT + ".{key}={allowed}{otherwise}.",
)
def truncated_sampling(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """With top_p or top_k the rollout's log-probs are renormalised over what is left; the trainer's are not."""
    ratios = importance_ratios(config)
    for key, allowed in (("top_p", "1.0"), ("top_k", "-1")):
        if not _is_set(config.actor_rollout_ref.rollout, key) or not _needs_logprobs(config):
            continue
        if ratios:
            effect, otherwise, severity = f"{ratios} divides one by the other", "", "error"
        else:
            effect, severity = "the mismatch metrics show the truncation", "warning"
            otherwise = ", or do not read the mismatch metrics as precision"
        yield {"key": key, "allowed": allowed, "effect": effect, "otherwise": otherwise, "severity": severity}


@rule(
    "temperature-in-half",
    "warning",
    setting=f"{ROLLOUT}.temperature",
    problem="verl divides {dtype} logits by it in {dtype}, vLLM divides in FP32: one more rounding.",
    allowed="1.0",
    remedy=f"Set {ROLLOUT}.temperature=1.0.",
)
def temperature_in_half(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl divides logits by the temperature in their 16-bit dtype, vLLM in FP32."""
    actor = engines(config)[0]
    if actor.compute in HALF and not actor.ours and _needs_logprobs(config):
        if config.actor_rollout_ref.rollout.temperature != 1:
            yield {"dtype": actor.compute}


@rule(
    "logprobs-missing",
    setting=f"{ROLLOUT}.calculate_log_probs",
    problem="{reason} needs the rollout's log-probs.",
    allowed="True",
    remedy=f"Set {ROLLOUT}.calculate_log_probs=True.",
)
def logprobs_missing(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Without the rollout's log-probs there is no ratio to them, and no mismatch that a preset asks to measure."""
    measured = OmegaConf.select(config, "mismatch.enabled") is True
    reason = importance_ratios(config) or ("mismatch.enabled=True" if measured else None)
    if reason and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield {"reason": reason}


@rule(
    "logprobs-missing",
    "warning",
    setting=f"{ROLLOUT}.calculate_log_probs",
    problem="trainer_mode={mode} has no mismatch to report.",
    allowed="True",
    remedy=f"Set {ROLLOUT}.calculate_log_probs=True.",
)
def nothing_to_report(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The measuring trainer was chosen by its name, and has nothing to measure."""
    mode = str((config.trainer.get("v1") or {}).get("trainer_mode", ""))
    if mode.startswith("vp_") and not config.actor_rollout_ref.rollout.calculate_log_probs:
        if not [*logprobs_missing.faults(config, environment)]:
            yield {"mode": mode}


@rule(
    "cascade-attention",
    "warning",
    setting=f"{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn",
    problem="vLLM {vllm} uses cascade attention when requests share a prefix, as those of one prompt do; on {gpu} it "
    "has been reported to raise the mismatch by orders of magnitude.",
    allowed="True",
    remedy=f"Set +{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True.",
)
def cascade_attention(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Cascade attention of older vLLM raises the mismatch on A100; vLLM has turned it off by default."""
    if config.actor_rollout_ref.rollout.name != "vllm" or environment.vllm is None:
        return
    gpu = next((name for name in environment.gpus if any(model in name for model in CASCADE_GPUS)), None)
    off = engine_kwargs(config).get("disable_cascade_attn", Version(environment.vllm) >= CASCADE_OFF_SINCE)
    if gpu is not None and not off:
        yield {"vllm": environment.vllm, "gpu": gpu, "value": False}


@rule(
    "adapter-not-loadable",
    setting="actor_rollout_ref.model.lora.merge",
    problem="verl 0.9.1 cannot load a LoRA adapter into vLLM {vllm}: it calls WeightsMapper.get_unstacked_mapper, "
    "which vLLM has not had since 0.29, and the first weight sync raises AttributeError.",
    allowed="vLLM < 0.29, or True",
    remedy="Install an older vLLM, or set actor_rollout_ref.model.lora.merge=True: the rollout then gets merged "
    "weights, in FP32 with a precision preset, and in BF16 with verl's own FSDP engine, which merges in BF16.",
)
def adapter_not_loadable(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl calls a method of vLLM to load LoRA adapters that vLLM has since renamed."""
    vllm = environment.vllm
    if config.actor_rollout_ref.rollout.name != "vllm" or vllm is None or loads_adapters(vllm):
        return
    if uses_adapter(config):
        yield {"vllm": vllm, "value": False}


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
