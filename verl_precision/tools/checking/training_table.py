"""What a run trains, row by row, and who decides it: a preset, a word of the command, a recipe, or verl's default."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.who_decides import decisions
from verl_precision.check.winning_words import WinningWord, shown
from verl_precision.losses.registry import POLICY_LOSSES, ratio_of
from verl_precision.losses.settings import NORM_MODE

ACTOR = "actor_rollout_ref.actor"
_LOSS, _CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"


@dataclass(frozen=True)
class TrainingRow:
    """One line of the table: what is trained, how, and who decides."""

    what: str
    value: str
    source: str


def training_table(config: DictConfig, words: Sequence[WinningWord] = ()) -> list[TrainingRow]:
    """Return the rows of a composed config with Hydra's own node; `words` of its command win over presets."""
    said, won = decisions(config), {each.setting: each for each in words}

    def who(setting: str) -> str:
        origin, word = said.origins.get(setting), said.word_about(setting)
        if setting in won:
            return f"the command's {shown(won[setting].word)}, over {won[setting].preset}"
        if origin is not None and (origin.group or word is None):
            return origin.who
        return f"the command's {shown(word[1])}" if word is not None else f"verl's default of {setting}"

    return [
        TrainingRow(what, value, "; ".join(dict.fromkeys(map(who, settings))))
        for what, value, *settings in _rows(config, lambda setting: OmegaConf.select(config, setting))
    ]


def _rows(config: DictConfig, get: Any) -> Iterator[tuple[str, ...]]:
    """Yield what a row is about, its value, and the settings that decide it."""
    loss = str(get(f"{_LOSS}.loss_mode") or "vanilla")
    yield "loss", loss, f"{_LOSS}.loss_mode"
    if get("distillation.enabled"):
        block = "distillation.distillation_loss"
        gradient = f", as a policy gradient with {get(f'{block}.policy_loss_mode')}"
        alone = "" if get(f"{block}.use_task_rewards") else ", alone"
        value = f"{get(f'{block}.loss_mode')}{gradient if get(f'{block}.use_policy_gradient') else ''}{alone}"
        yield "distillation", value, "distillation.enabled"
    estimator, by_std = get("algorithm.adv_estimator"), get("algorithm.norm_adv_by_std_in_grpo")
    if estimator == "grpo":
        norm = "divided by the group's std" if by_std else "not divided by the group's std"
        yield "advantage", f"grpo, {norm}", "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    else:
        yield "advantage", str(estimator), "algorithm.adv_estimator"
    mode, normaliser = get(f"{ACTOR}.loss_agg_mode"), get(f"{ACTOR}.loss_scale_factor")
    if mode == NORM_MODE:
        over = "each micro-batch's padded width" if normaliser is None else normaliser
        yield "aggregation", f"{mode}, over {over}", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    else:
        yield "aggregation", str(mode), f"{ACTOR}.loss_agg_mode"
    yield _clip(loss, config, get)
    yield "KL in the loss", *_term(get, f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    yield (
        "KL in the reward",
        *_term(get, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"),
    )
    entropy = get(f"{ACTOR}.entropy_coeff")
    yield "entropy", str(entropy) if entropy else "off", f"{ACTOR}.entropy_coeff"
    yield _weights(loss, get)
    bypass = get(f"{_CORRECTION}.bypass_mode")
    yield (
        "old log-probs",
        "the rollout's (bypass mode)" if bypass else "recomputed by the trainer",
        f"{_CORRECTION}.bypass_mode",
    )


def _clip(loss: str, config: DictConfig, get: Any) -> tuple[str, ...]:
    ours, ratio = POLICY_LOSSES.get(loss), ratio_of(config.actor_rollout_ref.actor)
    if (ours is not None and "clip_low" not in ours.parameters) or (ours is None and ratio and ratio.clip is None):
        return "clip range", "none: the loss has no clip", f"{_LOSS}.loss_mode"
    bounds = []
    for side in ("low", "high"):
        own = f"{ACTOR}.clip_ratio_{side}"
        bounds.append(own if get(own) is not None else f"{ACTOR}.clip_ratio")
    value = " and ".join(f"{get(bound)} {side}" for bound, side in zip(bounds, ("below", "above"), strict=True))
    if loss != "vanilla":
        return "clip range", value, *bounds
    return "clip range", f"{value}, dual clip at {get(f'{ACTOR}.clip_ratio_c')}", *bounds, f"{ACTOR}.clip_ratio_c"


def _term(get: Any, switch: str, coefficient: str, kind: str) -> tuple[str, ...]:
    return (f"{get(coefficient)} x {get(kind)}", switch, coefficient, kind) if get(switch) else ("off", switch)


def _weights(loss: str, get: Any) -> tuple[str, ...]:
    """Return the row of the weights that the rollout's log-probs give."""
    ours = POLICY_LOSSES.get(loss)
    if get(f"{_CORRECTION}.bypass_mode"):
        threshold = f"{_LOSS}.rollout_correction.rollout_is_threshold"
        if ours is None or "rollout_log_probs" not in ours.parameters:
            return "rollout weights", "none in bypass mode", f"{_CORRECTION}.bypass_mode"
        if "threshold" in ours.parameters:
            return "rollout weights", f"of the loss, C = {get(threshold)}", f"{_LOSS}.loss_mode", threshold
        return "rollout weights", "of the loss", f"{_LOSS}.loss_mode"
    said, settings = [], []
    for key in ("rollout_is", "rollout_rs"):
        if kind := get(f"{_CORRECTION}.{key}"):
            said.append(
                f"{'rejected by ' if key == 'rollout_rs' else ''}{kind}, {get(f'{_CORRECTION}.{key}_threshold')}"
            )
            settings += [f"{_CORRECTION}.{key}", f"{_CORRECTION}.{key}_threshold"]
    return "rollout weights", "; ".join(said) or "none", *(settings or [f"{_CORRECTION}.rollout_is"])
