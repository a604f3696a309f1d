"""Rules of the rollout: log-probs, truncated sampling, what the installed vLLM does."""

import re

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from verl_precision.base.dtypes import EXACT, HALF
from verl_precision.base.verl_config import (
    AGENT_LOOP,
    FSDP,
    OF_LOOP,
    ROLLOUT,
    engine_kwargs,
    engines,
    missing_log_probs,
    quantisations,
    rollout_dtype,
    sync_backend,
    uses_adapter,
)
from verl_precision.base.versions import loads_adapters
from verl_precision.check.rules.rule import Environment, Fault, Faults, Severity, fault_of_error, rule, told, told_where
from verl_precision.check.who_decides import USERS, speaker_of
from verl_precision.engine.arithmetic_choice import IN_CONFIG
from verl_precision.losses.registry import POLICY_LOSSES

# What leaves the distribution as it is.
NEUTRAL = {"temperature": (1,), "top_p": (1,), "top_k": (-1, 0), "custom.min_p": (None, 0)}
CASCADE_OFF_SINCE = Version("0.18.0")  # vLLM pull request 36318, merged in March 2026, made cascade attention opt-in.
CASCADE_GPUS = ("A100", "A800")
BLACKWELL = re.compile(r"\bG?B[123]00\b")
MASKS = f"{ROLLOUT}.custom.sampling_masks"


@rule("validation-repeats", "warning")
def validation_repeats(config: DictConfig, environment: Environment) -> Faults:
    """A greedy rollout gives one response, however often it is asked for one; verl's validation is greedy."""
    kwargs, setting = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs.n"
    greedy = [f"{key}={value}" for key, value in (("temperature", 0), ("top_k", 1)) if kwargs.get(key) == value]
    validates = config.trainer.test_freq > 0 or config.trainer.get("val_before_train")
    if (kwargs.n or 1) > 1 and greedy and validates and speaker_of(config, setting) in USERS:
        yield Fault(
            setting=setting,
            problem=f"with val_kwargs.{greedy[0]} the {kwargs.n} responses to a prompt are the same, but for rounding: "
            f"mean@{kwargs.n} and best@{kwargs.n} say what one response says",
            allowed="1, or a temperature above 0",
            remedy=f"Set {setting}=1, or set {ROLLOUT}.val_kwargs.temperature=0.6, say.",
        )


@rule("raw-logprobs")
def raw_logprobs(config: DictConfig, environment: Environment) -> Faults:
    """Raw log-probs are taken before temperature and truncation: another distribution than the one sampled from."""
    rollout = config.actor_rollout_ref.rollout
    mode = engine_kwargs(config).get("logprobs_mode", rollout.get("logprobs_mode"))
    if mode == "processed_logprobs" or not _needs_logprobs(config):
        return
    changed = [f"{key}={OmegaConf.select(rollout, key)}" for key in NEUTRAL if _is_set(rollout, key)]
    effect = f"and raw ones ignore {', '.join(changed)}" if changed else "and these are not, by definition"
    severity: Severity = "warning" if mode == "raw_logprobs" and not changed else "error"
    yield told("raw-logprobs", severity=severity, value=mode, effect=effect)


@rule("truncated-sampling")
def truncated_sampling(config: DictConfig, environment: Environment) -> Faults:
    """With top_p or top_k the rollout's log-probs are renormalised over what is left; the trainer's are not."""
    ratios = importance_ratios(config)
    if replays_masks(config) or not _needs_logprobs(config):
        return
    for key, allowed in (("top_p", "1.0"), ("top_k", "-1"), ("custom.min_p", "0")):
        if not _is_set(config.actor_rollout_ref.rollout, key):
            continue
        effect = f"{ratios} divides one by the other" if ratios else "the mismatch metrics show the truncation"
        otherwise = "" if ratios else ", or do not read the mismatch metrics as precision"
        severity: Severity = "error" if ratios or OmegaConf.select(config, IN_CONFIG) == EXACT else "warning"
        said = {"key": key, "effect": effect, "allowed": allowed, "otherwise": otherwise}
        yield told("truncated-sampling", severity=severity, **said)


@rule("temperature-in-half", "warning")
def temperature_in_half(config: DictConfig, environment: Environment) -> Faults:
    """verl, and its fused kernel in any engine, divide logits by the temperature in their 16 bits, vLLM in FP32."""
    actor, model = engines(config)[0], config.actor_rollout_ref.model
    temperature = config.actor_rollout_ref.rollout.temperature
    backend = OmegaConf.select(model, "fused_kernel_options.impl_backend")
    fused = bool(model.get("use_fused_kernels"))
    in_half = backend == "torch" if fused else not actor.our_fsdp  # triton's kernel divides its FP32 sums
    if temperature != 1 and actor.compute in HALF and in_half and _needs_logprobs(config):
        who = "the fused kernel of verl" if fused else "verl"
        case = " of ours" if fused and actor.our_fsdp else ""
        yield told(f"temperature-in-half{case}", who=who, actor=actor)


@rule("logprobs-missing")
def logprobs_missing(config: DictConfig, environment: Environment) -> Faults:
    """Without the rollout's log-probs there is no ratio to them, and no mismatch to measure."""
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    measured = OmegaConf.select(config, "mismatch.enabled") is True
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if reason := importance_ratios(config) or ("mismatch.enabled=True" if measured else None):
        yield fault_of_error(missing_log_probs(f"{reason} needs the rollout's log-probs"))
    elif mode.startswith("vp_"):
        yield told("logprobs-missing", severity="warning", mode=mode)


@rule("agent-loop")
def agent_loop(config: DictConfig, environment: Environment) -> Faults:
    """What our agent loop reads, and the agent loop, belong together; the loop speaks to vLLM."""
    rollout, custom, manager = config.actor_rollout_ref.rollout, f"{ROLLOUT}.custom", config.reward.reward_manager.name
    of_loop = {key: OmegaConf.select(config, f"{custom}.{key}") for key in OF_LOOP}
    given, stop, min_p = [key for key in OF_LOOP if of_loop[key] is not None], of_loop["stop"], of_loop["min_p"]
    finished = OmegaConf.select(config, "reward.custom_reward_function.reward_kwargs.require_finished")
    ours = rollout.agent.default_agent_loop == AGENT_LOOP
    strings = OmegaConf.is_list(stop) and stop and all(isinstance(text, str) and text for text in stop)
    share = isinstance(min_p, int | float) and 0 <= min_p <= 1
    wrong = {
        "truncated": finished and not (ours and of_loop["mark_truncated"]),
        "manager": finished and manager in ("dapo", "gdpo"),
        "unread": given and not ours,
        "empty": ours and not given,
        "stop": ours and stop is not None and not strings,
        "min_p": ours and min_p is not None and not share,
        "engine": ours and rollout.name != "vllm",
    }
    yield from told_where("agent-loop", wrong, manager=manager, given=", ".join(given), read=", ".join(OF_LOOP))


@rule("sampling-masks")
def sampling_masks(config: DictConfig, environment: Environment) -> Faults:
    """Masks need a bounded number of kept tokens, a rollout that may return them, and a trainer that reads them."""
    if not replays_masks(config):
        return
    actor, rollout, model = engines(config)[0], config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if not actor.our_fsdp:
        yield told("sampling-masks engine")
    if rollout.top_k < 1:
        yield told("sampling-masks top_k")
    most, least = engine_kwargs(config).get("max_logprobs", 20), 2 * rollout.top_k + 16
    if rollout.top_k >= 1 and 0 <= most < least:
        yield told("sampling-masks max_logprobs", least=least)
    wrong = {
        "penalty": rollout.get("repetition_penalty", 1.0) != 1,
        "log-probs": not rollout.calculate_log_probs,
        "mode": OmegaConf.select(config, "trainer.v1.trainer_mode") not in ("sync", "vp_sync"),
        "fp32": actor.our_fsdp and not actor.node.get("fp32_log_probs", True),
        "fused": model.get("use_fused_kernels"),
        "ulysses": actor.ulysses[1] > 1,
    }
    yield from told_where("sampling-masks", wrong, actor=actor)


@rule("cascade-attention", "warning", about="cascade attention on A100")
def cascade_attention(config: DictConfig, environment: Environment) -> Faults:
    """Cascade attention of older vLLM raises the mismatch on A100; vLLM has turned it off by default."""
    if config.actor_rollout_ref.rollout.name != "vllm" or config.trainer.device != "cuda":
        return
    vllm = environment.vllm
    gpu = next((name for name in environment.gpus if any(model in name for model in CASCADE_GPUS)), None)
    if vllm is None or gpu is None:
        return
    if not engine_kwargs(config).get("disable_cascade_attn", Version(vllm) >= CASCADE_OFF_SINCE):
        yield told("cascade-attention", value=False, vllm=vllm, gpu=gpu)


@rule("experts-kernel-bf16", "warning", about="the kernel of experts on Blackwell")
def experts_kernel_bf16(config: DictConfig, environment: Environment) -> Faults:
    """On Blackwell vLLM prefers FlashInfer's BF16 kernel for experts, and asks it for no dtype."""
    kwargs, dtype, on_gpu = engine_kwargs(config), rollout_dtype(config), config.trainer.device == "cuda"
    quantised = any(place.endswith(".quantization") for place in quantisations(config))  # they have other kernels
    if config.actor_rollout_ref.rollout.name != "vllm" or dtype not in ("fp16", "fp32") or quantised or not on_gpu:
        return
    gpu = next((name for name in environment.gpus if BLACKWELL.search(name.upper())), None)
    if (kwargs.get("moe_backend") or "auto") != "auto" or (environment.gpus and gpu is None):
        return
    if (model := environment.shape) is not None and model.experts > 1 and gpu is not None:
        setting = f"{ROLLOUT}.engine_kwargs.vllm.moe_backend"
        yield told("experts-kernel-bf16", setting=setting, value="auto", gpu=gpu, dtype=dtype)


@rule("separate-async-transport")
def separate_async_transport(config: DictConfig, environment: Environment) -> Faults:
    """verl's trainer with a rollout on GPUs of its own asserts against the sync inside one process."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if mode.removeprefix("vp_") == "separate_async" and sync_backend(config) == "naive":
        yield told("separate-async-transport", mode=mode)


@rule("adapter-not-loadable", about="whether vLLM loads adapters")
def adapter_not_loadable(config: DictConfig, environment: Environment) -> Faults:
    """verl calls a method of vLLM to load LoRA adapters that vLLM has since renamed."""
    if config.actor_rollout_ref.rollout.name != "vllm" or not uses_adapter(config):
        return
    if (vllm := environment.vllm) is not None and not loads_adapters(vllm):
        yield told("adapter-not-loadable", value=False, vllm=vllm)


@rule("adapter-not-delivered")
def adapter_not_delivered(config: DictConfig, environment: Environment) -> Faults:
    """Of its checkpoint engines, verl gives adapters to `naive` alone; the others get the base weights at each sync."""
    trains_adapters = engines(config)[0].strategy in (*FSDP, "megatron")  # the others train the whole model
    if uses_adapter(config) and trains_adapters and (backend := sync_backend(config)) != "naive":
        yield told("adapter-not-delivered", backend=backend)


def importance_ratios(config: DictConfig) -> str | None:
    """Return the setting that makes ratios between trainer and rollout, or None."""
    correction = config.algorithm.get("rollout_correction") or {}
    for key in ("rollout_is", "rollout_rs", "bypass_mode"):
        if correction.get(key):
            return f"algorithm.rollout_correction.{key}={correction[key]}"
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    ours = POLICY_LOSSES.get(loss)
    if loss == "bypass_mode" or (ours is not None and "rollout_log_probs" in ours.parameters):
        return f"loss_mode={loss}"
    return None


def replays_masks(config: DictConfig) -> bool:
    """Return whether the trainer renormalises over the tokens that the rollout kept."""
    return OmegaConf.select(config, MASKS) is True


def _needs_logprobs(config: DictConfig) -> bool:
    return bool(config.actor_rollout_ref.rollout.calculate_log_probs or importance_ratios(config))


def _is_set(rollout: DictConfig, key: str) -> bool:
    return OmegaConf.select(rollout, key) not in NEUTRAL[key]
