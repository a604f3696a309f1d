"""Rules of the rollout: log-probs, truncated sampling, what the installed vLLM does."""

import re

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from verl_precision.base.dtypes import EXACT, HALF
from verl_precision.base.verl_config import (
    AGENT_LOOP,
    BACKEND,
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
from verl_precision.check.rules.gpu_memory import shape_of
from verl_precision.check.rules.rule import Environment, Fault, Faults, Severity, faults_where, rule
from verl_precision.engine.arithmetic.chosen import IN_CONFIG
from verl_precision.losses.registry import POLICY_LOSSES

# What leaves the distribution as it is.
NEUTRAL = {"temperature": (1,), "top_p": (1,), "top_k": (-1, 0), "custom.min_p": (None, 0)}
CASCADE_OFF_SINCE = Version("0.18.0")  # vLLM pull request 36318, merged in March 2026, made cascade attention opt-in.
CASCADE_GPUS = ("A100", "A800")
BLACKWELL = re.compile(r"\bG?B[123]00\b")
MASKS = f"{ROLLOUT}.custom.sampling_masks"


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
    setting = f"{ROLLOUT}.logprobs_mode"
    problem = f"they are compared with the trainer's as those of the policy it sampled from, {effect}"
    yield Fault(severity=severity, setting=setting, value=mode, problem=problem, allowed="processed_logprobs")


@rule("truncated-sampling")
def truncated_sampling(config: DictConfig, environment: Environment) -> Faults:
    """With top_p or top_k the rollout's log-probs are renormalised over what is left; the trainer's are not."""
    ratios = importance_ratios(config)
    if replays_masks(config) or not _needs_logprobs(config):
        return
    for key, allowed in (("top_p", "1.0"), ("top_k", "-1"), ("custom.min_p", "0")):
        if not _is_set(config.actor_rollout_ref.rollout, key):
            continue
        setting = f"{ROLLOUT}.{key}"
        effect = f"{ratios} divides one by the other" if ratios else "the mismatch metrics show the truncation"
        otherwise = "" if ratios else ", or do not read the mismatch metrics as precision"
        severity: Severity = "error" if ratios or OmegaConf.select(config, IN_CONFIG) in EXACT else "warning"
        problem = f"the rollout renormalises over the tokens it kept, the trainer over all tokens: {effect}"
        remedy = f"Set {setting}={allowed}, or +sampling_masks=replay (docs/sampling_masks.md){otherwise}."
        yield Fault("", severity, setting, None, problem, f"{allowed}, or sampling masks", remedy)


@rule("temperature-in-half", "warning")
def temperature_in_half(config: DictConfig, environment: Environment) -> Faults:
    """verl, and its fused kernel in any engine, divide logits by the temperature in their 16 bits, vLLM in FP32."""
    actor, model = engines(config)[0], config.actor_rollout_ref.model
    temperature = config.actor_rollout_ref.rollout.temperature
    backend = OmegaConf.select(model, "fused_kernel_options.impl_backend")
    fused = bool(model.get("use_fused_kernels"))
    in_half = backend == "torch" if fused else not actor.ours  # triton's kernel divides its FP32 sums
    if temperature != 1 and actor.compute in HALF and in_half and _needs_logprobs(config):
        who = "the fused kernel of verl" if fused else "verl"
        problem = f"{who} divides {actor.compute} logits by it in {actor.compute}, vLLM in FP32: one more rounding"
        remedy = "Set actor_rollout_ref.model.use_fused_kernels=False." if fused and actor.ours else ""
        yield Fault(setting=f"{ROLLOUT}.temperature", problem=problem, allowed="1.0", remedy=remedy)


@rule("logprobs-missing")
def logprobs_missing(config: DictConfig, environment: Environment) -> Faults:
    """Without the rollout's log-probs there is no ratio to them, and no mismatch to measure."""
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    measured = OmegaConf.select(config, "mismatch.enabled") is True
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if reason := importance_ratios(config) or ("mismatch.enabled=True" if measured else None):
        yield missing_log_probs(f"{reason} needs the rollout's log-probs")
    elif mode.startswith("vp_"):
        setting, problem = f"{ROLLOUT}.calculate_log_probs", f"trainer_mode={mode} has no mismatch to report"
        yield Fault(severity="warning", setting=setting, problem=problem, allowed="True")


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
    yield from faults_where(
        (finished and not (ours and of_loop["mark_truncated"]), f"{custom}.mark_truncated", f"only {AGENT_LOOP} tells "
         "the reward's require_finished whether a response was cut off", f"True, with {AGENT_LOOP}"),
        (finished and manager in ("dapo", "gdpo"), "reward.reward_manager.name", f"verl's {manager} tells a reward "
         "nothing of the agent loop, and require_finished needs it", "naive"),
        (given and not ours, f"{ROLLOUT}.agent.default_agent_loop", f"it does not read {', '.join(given)} of {custom}",
         AGENT_LOOP),
        (ours and not given, custom, f"the agent loop {AGENT_LOOP} reads {', '.join(OF_LOOP)}, and none is there",
         'such as {stop: ["</answer>"]}'),
        (ours and stop is not None and not strings, f"{custom}.stop", f"the agent loop {AGENT_LOOP} ends a response at "
         "a string", 'a list of strings such as ["</answer>"]'),
        (ours and min_p is not None and not share, f"{custom}.min_p", "min-p is a share of the most probable token's "
         "probability", "0 to 1"),
        (ours and rollout.name != "vllm", f"{ROLLOUT}.name", f"{AGENT_LOOP} knows vLLM's sampling only", "vllm"),
    )  # fmt: skip


@rule("sampling-masks")
def sampling_masks(config: DictConfig, environment: Environment) -> Faults:
    """Masks need a bounded number of kept tokens, a rollout that may return them, and a trainer that reads them."""
    if not replays_masks(config):
        return
    actor, rollout, model = engines(config)[0], config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if not actor.ours or actor.strategy not in FSDP:
        problem = "only this package's FSDP engine renormalises over them"
        yield Fault(setting=MASKS, problem=problem, allowed="False", remedy="Choose a precision preset.")
    if rollout.top_k < 1:
        problem = "without top_k the mask of a token could hold the whole vocabulary"
        remedy = f"Set {ROLLOUT}.top_k=256, say: top_p alone rarely keeps more."
        yield Fault(setting=f"{ROLLOUT}.top_k", problem=problem, allowed="1 or more", remedy=remedy)
    most, least = engine_kwargs(config).get("max_logprobs", 20), 2 * rollout.top_k + 16
    if rollout.top_k >= 1 and 0 <= most < least:
        setting, problem = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs", "vLLM refuses to return so many tokens"
        yield Fault(setting=setting, problem=problem, allowed=f"-1, or {least} or more", remedy=f"Set ++{setting}=-1.")
    log_probs, mode = rollout.calculate_log_probs, str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    fp32_log_probs, penalty = actor.node.get("fp32_log_probs", True), rollout.get("repetition_penalty", 1.0)
    kept, own = "a penalty changes the log-probs of the tokens that are kept", "verl's own log-probs know no masks"
    interrupted = "verl joins the parts of a response that was interrupted, and drops their masks"
    fused = "actor_rollout_ref.model.use_fused_kernels"
    yield from faults_where(
        (penalty != 1, f"{ROLLOUT}.repetition_penalty", kept, "1.0"),
        (not log_probs, f"{ROLLOUT}.calculate_log_probs", "the masks come with the log-probs", "True"),
        (mode not in ("sync", "vp_sync"), "trainer.v1.trainer_mode", interrupted, "sync or vp_sync"),
        (actor.ours and not fp32_log_probs, f"{actor.setting}.fp32_log_probs", own, "True"),
        (model.get("use_fused_kernels"), fused, "fused kernels never show their logits", "False"),
        (actor.ulysses[1] > 1, actor.ulysses[0], "a rank then sees a part of each sequence", "1"),
    )


@rule("cascade-attention", "warning")
def cascade_attention(config: DictConfig, environment: Environment) -> Faults:
    """Cascade attention of older vLLM raises the mismatch on A100; vLLM has turned it off by default."""
    vllm = environment.vllm
    gpu = next((name for name in environment.gpus if any(model in name for model in CASCADE_GPUS)), None)
    if config.actor_rollout_ref.rollout.name != "vllm" or vllm is None or gpu is None:
        return
    if not engine_kwargs(config).get("disable_cascade_attn", Version(vllm) >= CASCADE_OFF_SINCE):
        setting = f"{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn"
        problem = f"vLLM {vllm} uses cascade attention, reported on {gpu} to raise the mismatch by orders of magnitude"
        yield Fault(setting=setting, value=False, problem=problem, allowed="True", remedy=f"Set +{setting}=True.")


@rule("experts-kernel-bf16", "warning")
def experts_kernel_bf16(config: DictConfig, environment: Environment) -> Faults:
    """On Blackwell vLLM prefers FlashInfer's BF16 kernel for experts, and asks it for no dtype."""
    model, kwargs = shape_of(environment.model), engine_kwargs(config)
    gpu = next((name for name in environment.gpus if BLACKWELL.search(name.upper())), None)
    if gpu is None or model is None or model.experts == 1 or config.actor_rollout_ref.rollout.name != "vllm":
        return
    quantised = any(place.endswith(".quantization") for place in quantisations(config))  # they have other kernels
    setting, dtype = f"{ROLLOUT}.engine_kwargs.vllm.moe_backend", rollout_dtype(config)
    if dtype in ("fp16", "fp32") and (kwargs.get("moe_backend") or "auto") == "auto" and not quantised:
        problem = f"on {gpu} vLLM 0.28 prefers a BF16 kernel for experts, without a look at the dtype, {dtype} (read)"
        yield Fault(setting=setting, value="auto", problem=problem, allowed="triton", remedy=f"Set +{setting}=triton.")


@rule("separate-async-transport")
def separate_async_transport(config: DictConfig, environment: Environment) -> Faults:
    """verl's trainer with a rollout on GPUs of its own asserts against the sync inside one process."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if mode.removeprefix("vp_") == "separate_async" and sync_backend(config) == "naive":
        problem = f"{mode} has a rollout on GPUs of its own, which naive does not reach: verl asserts against it"
        allowed = "nccl or nixl; mooncake, kimi_ckpt_engine and delta_sharded round weights to BF16"
        yield Fault(setting=BACKEND, problem=problem, allowed=allowed, remedy=f"Set {BACKEND}=nccl.")


@rule("adapter-not-loadable")
def adapter_not_loadable(config: DictConfig, environment: Environment) -> Faults:
    """verl calls a method of vLLM to load LoRA adapters that vLLM has since renamed."""
    vllm = environment.vllm
    if config.actor_rollout_ref.rollout.name != "vllm" or vllm is None or loads_adapters(vllm):
        return
    if uses_adapter(config):
        setting = "actor_rollout_ref.model.lora.merge"
        problem = f"verl 0.9.1 cannot load an adapter into vLLM {vllm}, which has no get_unstacked_mapper any more"
        remedy = "Install an older vLLM, or set actor_rollout_ref.model.lora.merge=True."
        yield Fault(setting=setting, value=False, problem=problem, allowed="vLLM < 0.29, or True", remedy=remedy)


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
