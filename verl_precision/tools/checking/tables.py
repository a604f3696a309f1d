"""The two tables of a run: its dtypes, and what is trained; each row names the setting that decides."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import ROLLOUT, engines, rollout_dtype, transport_dtype
from verl_precision.check.models import served_models
from verl_precision.check.who_decides import decisions
from verl_precision.check.winning_words import WinningWord, shown
from verl_precision.losses.registry import POLICY_LOSSES, ratio_of
from verl_precision.losses.settings import NORM_MODE

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
BYPASS = f"{CORRECTION}.bypass_mode"


class Row(NamedTuple):
    """One line of a table."""

    what: str
    value: str
    source: str


def dtype_table(config: DictConfig) -> Iterator[Row]:
    """Yield what will run in which dtype."""
    for engine in engines(config):
        of_weights, of_sums = engine.sources
        yield Row(f"{engine.role} forward", engine.compute, engine.source)
        yield Row(f"{engine.role} {'master weights, Adam' if engine.trains else 'weights'}", engine.master, of_weights)
        if engine.trains:
            yield Row(f"{engine.role} gradient reduction", engine.reduce, of_sums)
    yield Row("rollout", rollout_dtype(config), f"{ROLLOUT}.dtype")
    yield from (Row(served.role, served.dtype, served.source) for served in served_models(config))
    yield Row("weights to the rollout", *transport_dtype(config))
    name = config.actor_rollout_ref.rollout.name
    takes = "vLLM computes them in FP32" if name == "vllm" else f"as {name} computes them: not verified here"
    yield Row("rollout log-probs", "fp32", takes)
    actor = engines(config)[0]
    dtype, source = "fp32", "verl: autocast, or flash-attn's kernel, computes them in FP32"
    if actor.our_fsdp and actor.node.get("fp32_log_probs", True):
        source = f"{actor.setting}.fp32_log_probs"
    elif actor.strategy == "megatron":
        source = f"Megatron's vocabulary-parallel sum; a temperature divides {actor.compute}"
    elif config.trainer.device == "cpu":
        dtype, source = actor.compute, "log-softmax in the logits' dtype (device cpu)"
    yield Row("trainer log-probs", dtype, source)


def training_table(config: DictConfig, words: Sequence[WinningWord] = ()) -> list[Row]:
    """Return what is trained, of a composed config with Hydra's own node; `words` of its command win over presets."""
    said, won = decisions(config), {each.setting: each for each in words}

    def who(setting: str) -> str:
        origin, word = said.origins.get(setting), said.word_about(setting)
        if setting in won:
            return f"the command's {shown(won[setting].word)}, over {won[setting].preset}"
        if origin is not None and (origin.group or word is None):
            return origin.who
        return f"the command's {shown(word[1])}" if word is not None else f"verl's default of {setting}"

    rows = _trained(config, lambda setting: OmegaConf.select(config, setting))
    return [Row(what, value, "; ".join(dict.fromkeys(map(who, settings)))) for what, value, *settings in rows]


def _trained(config: DictConfig, get: Callable[[str], Any]) -> Iterator[tuple[str, ...]]:
    """Yield what a row is about, its value, and the settings that decide it."""
    loss = str(get(LOSS) or "vanilla")
    yield "loss", loss, LOSS
    if get("distillation.enabled"):
        block = "distillation.distillation_loss"
        gradient = f", as a policy gradient with {get(f'{block}.policy_loss_mode')}"
        value = f"{get(f'{block}.loss_mode')}{gradient if get(f'{block}.use_policy_gradient') else ''}"
        yield "distillation", value, "distillation.enabled"
    estimator, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    if get(estimator) == "grpo":
        yield "advantage", f"grpo, {'' if get(by_std) else 'not '}divided by the group's std", estimator, by_std
    else:
        yield "advantage", str(get(estimator)), estimator
    mode, normaliser = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    if get(mode) == NORM_MODE:
        yield "aggregation", f"{get(mode)}, over {get(normaliser) or 'the padded width'}", mode, normaliser
    else:
        yield "aggregation", str(get(mode)), mode
    yield "clip range", *_clip(loss, config, get)
    loss_term = (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    reward_term = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    for where, term in (("loss", loss_term), ("reward", reward_term)):
        switch, coefficient, kind = term
        on = (f"{get(coefficient)} x {get(kind)}", *term)
        yield f"KL in the {where}", *(on if get(switch) else ("off", switch))
    entropy = f"{ACTOR}.entropy_coeff"
    yield "entropy", str(get(entropy) or "off"), entropy
    yield "rollout weights", *_weights(loss, get)
    yield "old log-probs", "the rollout's (bypass mode)" if get(BYPASS) else "recomputed by the trainer", BYPASS


def _clip(loss: str, config: DictConfig, get: Callable[[str], Any]) -> tuple[str, ...]:
    ours, ratio = POLICY_LOSSES.get(loss), ratio_of(config.actor_rollout_ref.actor)
    if (ours is not None and "clip_low" not in ours.parameters) or (ours is None and ratio and ratio.clip is None):
        return "none: the loss does not clip", LOSS
    own = [f"{ACTOR}.clip_ratio_{side}" for side in ("low", "high")]
    low, high = (each if get(each) is not None else f"{ACTOR}.clip_ratio" for each in own)
    value, dual = f"{get(low)} below and {get(high)} above", f"{ACTOR}.clip_ratio_c"
    return (f"{value}, dual clip at {get(dual)}", low, high, dual) if loss == "vanilla" else (value, low, high)


def _weights(loss: str, get: Callable[[str], Any]) -> tuple[str, ...]:
    """Return the weights that the rollout's log-probs give, and the settings that decide it."""
    if get(BYPASS):
        parameters = POLICY_LOSSES[loss].parameters if loss in POLICY_LOSSES else ()
        if "rollout_log_probs" not in parameters:
            return "none in bypass mode", BYPASS
        threshold = f"{ACTOR}.policy_loss.rollout_correction.rollout_is_threshold"
        if "threshold" not in parameters:
            return "of the loss", LOSS
        return f"of the loss, C = {get(threshold)}", LOSS, threshold
    kinds = {f"{CORRECTION}.rollout_is": "", f"{CORRECTION}.rollout_rs": "rejected by "}
    used = [kind for kind in kinds if get(kind)]
    if not used:
        return "none", f"{CORRECTION}.rollout_is"
    said = "; ".join(f"{kinds[kind]}{get(kind)}, {get(f'{kind}_threshold')}" for kind in used)
    return said, *(setting for kind in used for setting in (kind, f"{kind}_threshold"))
