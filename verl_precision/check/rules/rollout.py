"""Rules of the rollout: log-probs, truncated sampling, what the installed vLLM does."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

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
    sync_backend,
    uses_adapter,
)
from verl_precision.base.versions import loads_adapters
from verl_precision.check.rules.rule import Environment, Fault, Severity, fault_of_error, rule
from verl_precision.check.who_decides import decisions
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.losses.registry import POLICY_LOSSES

# Values that do not change the distribution.
NEUTRAL = {"temperature": (1,), "top_p": (1,), "top_k": (-1, 0), "custom.min_p": (None, 0)}
MASKS = f"{ROLLOUT}.custom.sampling_masks"
MERGE = "actor_rollout_ref.model.lora.merge"


@rule("validation-repeats", "warning")
def validation_repeats(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A greedy rollout gives the same response each time; verl's validation is greedy."""
    kwargs, setting = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs.n"
    greedy = [f"{key}={value}" for key, value in (("temperature", 0), ("top_k", 1)) if kwargs.get(key) == value]
    validates = config.trainer.test_freq > 0 or config.trainer.get("val_before_train")
    said = decisions(config)
    by_preset = setting in said.origins and said.origins[setting].group and not said.word_about(setting)
    if (kwargs.n or 1) > 1 and greedy and validates and not by_preset:
        yield Fault.worded("validation-repeats", setting, greedy=greedy[0], responses=kwargs.n)


@rule("raw-logprobs")
def raw_logprobs(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Raw log-probs are taken before temperature and truncation: another distribution than the one sampled from."""
    rollout = config.actor_rollout_ref.rollout
    mode = engine_kwargs(config).get("logprobs_mode", rollout.get("logprobs_mode"))
    if mode == "processed_logprobs" or not _needs_logprobs(config):
        return
    changed = [f"{key}={OmegaConf.select(rollout, key)}" for key in NEUTRAL if _is_set(rollout, key)]
    effect = f"and raw ones ignore {', '.join(changed)}" if changed else "and these are not, by definition"
    problem = f"the trainer's log-probs are compared with them as if they were those of the sampling policy, {effect}"
    severity: Severity = "warning" if mode == "raw_logprobs" and not changed else "error"
    yield Fault(f"{ROLLOUT}.logprobs_mode", problem, "processed_logprobs", severity=severity, value=mode)


@rule("truncated-sampling")
def truncated_sampling(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """With top_p or top_k the rollout's log-probs are renormalised over what is left; the trainer's are not."""
    ratios = importance_ratios(config)
    if replays_masks(config) or not _needs_logprobs(config):
        return
    effect = f"{ratios} divides the two" if ratios else "the mismatch metrics also contain the truncation"
    severity: Severity = "error" if ratios or OmegaConf.select(config, ARITHMETIC_SETTING) == EXACT else "warning"
    for key, all_tokens in (("top_p", "1.0"), ("top_k", "-1"), ("custom.min_p", "0")):
        if _is_set(config.actor_rollout_ref.rollout, key):
            setting = f"{ROLLOUT}.{key}"
            yield Fault.worded("truncated-sampling", setting, severity=severity, effect=effect, all=all_tokens)


@rule("temperature-in-half", "warning")
def temperature_in_half(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl, and its fused kernel in any engine, divide logits by the temperature in their 16 bits, vLLM in FP32."""
    actor, model = engines(config)[0], config.actor_rollout_ref.model
    fused, setting = bool(model.get("use_fused_kernels")), f"{ROLLOUT}.temperature"
    backend = OmegaConf.select(model, "fused_kernel_options.impl_backend")
    in_half = backend == "torch" if fused else not actor.our_fsdp  # triton's kernel divides its FP32 sums
    if OmegaConf.select(config, setting) != 1 and actor.compute in HALF and in_half and _needs_logprobs(config):
        who = "the fused kernel of verl" if fused else "verl"
        problem = f"{who} divides {actor.compute} logits by it in {actor.compute}, vLLM in FP32: this adds a rounding"
        kernels = "Set actor_rollout_ref.model.use_fused_kernels=False."
        yield Fault(setting, problem, "1.0", kernels if fused and actor.our_fsdp else "")


@rule("logprobs-missing")
def logprobs_missing(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Without the rollout's log-probs there is no ratio to them, and no mismatch to measure."""
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    measured = OmegaConf.select(config, "mismatch.enabled") is True
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if reason := importance_ratios(config) or ("mismatch.enabled=True" if measured else None):
        yield fault_of_error(missing_log_probs(f"{reason} needs the rollout's log-probs"))
    elif mode.startswith("vp_"):
        problem = f"trainer_mode={mode} has no mismatch to report"
        yield Fault(f"{ROLLOUT}.calculate_log_probs", problem, "True", severity="warning")


@rule("agent-loop")
def agent_loop(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The settings that our agent loop reads need this loop, and the loop needs vLLM."""
    rollout, custom = config.actor_rollout_ref.rollout, f"{ROLLOUT}.custom"
    of_loop = {key: OmegaConf.select(config, f"{custom}.{key}") for key in OF_LOOP}
    given, stop = [key for key in OF_LOOP if of_loop[key] is not None], of_loop["stop"]
    ours = rollout.agent.default_agent_loop == AGENT_LOOP
    if OmegaConf.select(config, "reward.custom_reward_function.reward_kwargs.require_finished"):
        if not (ours and of_loop["mark_truncated"]) or config.reward.reward_manager.name in ("dapo", "gdpo"):
            yield Fault.worded("agent-loop/require_finished", f"{custom}.mark_truncated")
    if not ours:
        if given:
            yield Fault.worded("agent-loop/not ours", f"{ROLLOUT}.agent.default_agent_loop", given=", ".join(given))
        return
    if rollout.name != "vllm":
        yield Fault(f"{ROLLOUT}.name", f"{AGENT_LOOP} supports only vLLM's sampling", "vllm")
    if stop is not None and not (OmegaConf.is_list(stop) and stop and all(isinstance(x, str) and x for x in stop)):
        yield Fault.worded("agent-loop/stop", f"{custom}.stop")


@rule("sampling-masks")
def sampling_masks(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Masks need a bounded number of kept tokens, a rollout that may return them, and a trainer that reads them."""
    if not replays_masks(config):
        return
    actor, rollout, model = engines(config)[0], config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    most, least = engine_kwargs(config).get("max_logprobs", 20), 2 * rollout.top_k + 16
    if not actor.our_fsdp:
        yield Fault.worded("sampling-masks/engine", MASKS)
    if rollout.top_k < 1:
        yield Fault.worded("sampling-masks/top_k", f"{ROLLOUT}.top_k")
    elif 0 <= most < least:
        yield Fault.worded("sampling-masks/max_logprobs", f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs", least=least)
    if rollout.get("repetition_penalty", 1.0) != 1:
        yield Fault.worded("sampling-masks/penalty", f"{ROLLOUT}.repetition_penalty")
    if not rollout.calculate_log_probs:
        yield Fault(f"{ROLLOUT}.calculate_log_probs", "the masks come with the log-probs", "True")
    if OmegaConf.select(config, "trainer.v1.trainer_mode") not in ("sync", "vp_sync"):
        yield Fault.worded("sampling-masks/trainer", "trainer.v1.trainer_mode")
    if actor.our_fsdp and not actor.node.get("fp32_log_probs", True):
        yield Fault(f"{actor.setting}.fp32_log_probs", "verl's own log-probs do not use masks", "True")
    if model.get("use_fused_kernels"):
        yield Fault("actor_rollout_ref.model.use_fused_kernels", "fused kernels do not return logits", "False")
    if actor.ulysses[1] > 1:
        yield Fault(actor.ulysses[0], "each rank then has only a part of each sequence", "1")


@rule("draft-not-sent", "warning")
def draft_not_sent(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl sends each weight to an MTP draft as well. FSDP's models have no MTP layer; other drafts get nothing."""
    mtp, given = config.actor_rollout_ref.model.get("mtp") or {}, engine_kwargs(config).get("speculative_config") or {}
    load = config.actor_rollout_ref.rollout.load_format
    if mtp.get("enable") and mtp.get("enable_rollout"):
        if engines(config)[0].strategy in FSDP:
            yield Fault.worded("draft-not-sent", "actor_rollout_ref.model.mtp.enable_rollout", load=load)
    elif isinstance(given, DictConfig) and given.get("model"):
        yield Fault.worded("draft-not-sent", f"{ROLLOUT}.engine_kwargs.vllm.speculative_config", load=load)


@rule("adapter-not-loadable")
def adapter_not_loadable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """To load LoRA adapters verl calls a method of vLLM that vLLM has since renamed."""
    if config.actor_rollout_ref.rollout.name != "vllm" or not uses_adapter(config):
        return
    if (vllm := environment.vllm) is not None and not loads_adapters(vllm):
        yield Fault.worded("adapter-not-loadable", MERGE, value=False, vllm=vllm)


@rule("adapter-not-delivered")
def adapter_not_delivered(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Only verl's checkpoint engine `naive` sends adapters; the others send the base weights at each sync."""
    trains_adapters = engines(config)[0].strategy in (*FSDP, "megatron")  # other engines train the whole model
    if uses_adapter(config) and trains_adapters and (backend := sync_backend(config)) != "naive":
        yield Fault.worded("adapter-not-delivered", BACKEND, backend=backend)


def importance_ratios(config: DictConfig) -> str | None:
    """Return the setting that turns on importance ratios between trainer and rollout, or None."""
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
