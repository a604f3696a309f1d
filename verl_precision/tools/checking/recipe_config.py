"""The report on the run of a recipe or a command: its dtypes, its training, and every fault.

Two tables show the dtypes and the training. Each row names the setting that decides.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base import verl_config
from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.base.verl_config import ACTOR, BYPASS, CORRECTION, LOSS, ROLLOUT, engines
from verl_precision.check.keys import unresolved
from verl_precision.check.models import served_models
from verl_precision.check.probe import gpus_here, probe_environment
from verl_precision.check.rules.gpu_memory import chosen_scale, gpu_memory, require_known_gpu
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import SEVERITIES, Fault, Severity, fault_of_error
from verl_precision.check.who_decides import REPLACED, WIN, WinningWord, decisions, is_about, shown, winning_words
from verl_precision.integration.trainer.run_identity import name_the_run
from verl_precision.integration.trainer.saving import saves
from verl_precision.losses.registry import POLICY_LOSSES, ratio_of
from verl_precision.losses.settings import NORM_MODE
from verl_precision.tools.checking.composing import MAIN, compose_recipe, composer
from verl_precision.tools.checking.words import added, wrong_words


class Row(NamedTuple):
    """One line of a table."""

    what: str
    value: str
    source: str


@dataclass(frozen=True)
class RecipeReport:
    """The report of a check of a recipe."""

    rows: Sequence[Row]  # what runs in which dtype
    faults: list[Fault]  # every fault, errors first
    folder: str | None = None  # of the checkpoints, with the run's digest; None: the run saves none
    training: Sequence[Row] = ()  # what is trained
    words: Sequence[WinningWord] = ()  # the command's words that win over presets, also those that contradict no preset
    replaced: Sequence[Mapping[str, Any]] = ()  # words over which presets won, with presets=win
    way_out: Mapping[str, Any] | None = None  # words that contradict presets, and the whole command without them

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings and unchecked items do not count."""
        return not self.counts["error"]

    @property
    def counts(self) -> dict[Severity, int]:
        """Number of errors, warnings and unchecked items."""
        found = [fault.severity for fault in self.faults]
        return {severity: found.count(severity) for severity in SEVERITIES}

    def as_json(self) -> str:
        """Return the report as JSON."""
        content: dict[str, Any] = {"ok": self.ok, "counts": self.counts}
        content["dtypes"] = [{"what": row.what, "dtype": row.value, "source": row.source} for row in self.rows]
        content["training"] = [row._asdict() for row in self.training]
        content |= {"findings": [*map(vars, self.faults)], "words_over_presets": [*map(vars, self.words)]}
        content |= {"replaced": self.replaced, "way_out": self.way_out, "checkpoints": self.folder}
        return json.dumps(content, indent=2, default=str)


def check_command(path: Path, overrides: Sequence[str], typed: Sequence[str], **meant: Any) -> RecipeReport:
    """Check the config of a command; if Hydra refuses words of it, report all of these words instead.

    Rules would only report the consequences of such words. Path and overrides come from the typed words; `meant` is
    passed to `check_recipe`.

    Raises:
        ConfigurationError: If the config does not compose for another reason.
    """
    try:
        return check_recipe(path, overrides, typed, **meant)
    except ConfigurationError:
        wrong, config = wrong_words(composer(path), path, overrides)
        if not wrong:
            raise
        named = {error.setting for error in wrong}
        others = [fault for fault in added(config, overrides) if fault.setting not in named]
        return RecipeReport([], _merged([fault_of_error(error, "unknown-key", "error") for error in wrong], others))


def _merged(faults: list[Fault], of_words: Iterable[Fault]) -> list[Fault]:
    """Return the faults of the rules and of a command's words, errors first, one fault for each cause."""
    told = list(of_words)
    wrong = [f"{each.setting}." for each in told if each.severity == "error"]
    refused = [f"{each.setting}." for each in faults if each.name == "verl-refuses"]
    for fault in faults:
        same = {"verl-refuses": wrong, "setting-ignored": wrong + refused}.get(fault.name, [])
        if not any(key.startswith(f"{fault.setting}.") for key in same):
            told.append(fault)
    return sorted((replace(each, problem=sentence(each.problem)) for each in told), key=lambda each: each.rank)


def check_recipe(
    path: Path,
    overrides: Sequence[str],
    typed: Sequence[str] = (),
    gpu: str | None = None,
    model_config: Path | None = None,
) -> RecipeReport:
    """Compose a recipe as verl would, and apply every rule.

    `gpu` names the GPU that the run is for, and `model_config` is a file that stands for the model's config.json.

    A problem of this machine (data, memory) is an error in a run, and only a warning here, since a recipe is often
    checked on another machine. If the run is for another machine, the item counts as not checked.
    """
    config = compose_recipe(path, overrides)
    fit_to_engine(config)
    try:
        name_the_run(config)
        here = gpus_here() if config.trainer.device == "cuda" else ()
        gpus = here if gpu is None else (require_known_gpu(gpu),)
        environment = probe_environment(config, gpus, why_elsewhere(config, gpu, here), model_config)
        faults = find_faults(config, environment, this_machine=False)
        words = winning_words(config)
        meant_to_win = OmegaConf.select(config, WIN) is False
        lost = [each.setting for each in words if each.contradicts and not meant_to_win]
        leave_out = [word for key, word in decisions(config).words if any(is_about(key, setting) for setting in lost)]
        return RecipeReport(
            rows=list(dtype_table(config)),
            faults=_merged(faults, added(config, overrides)),
            folder=config.trainer.default_local_dir if saves(config) else None,
            training=training_table(config, words),
            words=words,
            replaced=OmegaConf.to_container(OmegaConf.select(config, REPLACED, default=OmegaConf.create([]))),
            way_out=_way_out(leave_out, path, overrides, typed),
        )
    except OmegaConfBaseException as error:
        raise unresolved(error, path) from error


def _way_out(leave_out: list[str], path: Path, overrides: Sequence[str], typed: Sequence[str]) -> dict[str, Any] | None:
    """Return words to leave out, and the whole command without them: the typed one, or one that starts the recipe."""
    if not leave_out:
        return None
    front = ["python", "-m", MAIN]
    if list(typed) != list(overrides):
        front += ["--config-dir", str(path.parent), "--config-name", path.stem]
    is_command = typed and list(typed) != list(overrides) and Path(typed[0]) != path
    whole = typed if is_command else [*front, *overrides]
    return {"leave_out": leave_out, "command": shlex.join(word for word in whole if word not in leave_out)}


def why_elsewhere(config: DictConfig, gpu: str | None, here: Sequence[str]) -> str:
    """Return why a run is for another machine than this one with these GPUs; empty if it is for this one.

    A run on a CPU is for any machine, and so for this one.
    """
    if config.trainer.device == "cpu":
        return ""
    if gpu is not None:
        return f"--gpu {gpu}"
    if not here:
        return f"trainer.device={config.trainer.device}, and no such device is here"
    scale = chosen_scale(config)
    named = gpu_memory(scale.replace("_", " "))
    others = named is not None and all(gpu_memory(name) != named for name in here)
    return f"scale={scale}, and here is {here[0]}" if others else ""


def dtype_table(config: DictConfig) -> Iterator[Row]:
    """Yield a row for each part of the run, with its dtype."""
    for engine in engines(config):
        of_weights, of_sums = engine.sources
        yield Row(f"{engine.role} forward", engine.compute, engine.source)
        yield Row(f"{engine.role} {'master weights, Adam' if engine.trains else 'weights'}", engine.master, of_weights)
        if engine.trains:
            yield Row(f"{engine.role} gradient reduction", engine.reduce, of_sums)
    yield Row("rollout", verl_config.rollout_dtype(config), f"{ROLLOUT}.dtype")
    yield from (Row(served.role, served.dtype, served.source) for served in served_models(config))
    yield Row("weights to the rollout", *verl_config.transport_dtype(config))
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
    """Return the rows of the training; the config has Hydra's own node, and `words` of its command win over presets."""
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
    """Yield the subject of each row, its value, and the settings that decide it."""
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
    """Return the weights that the rollout's log-probs give, and the settings that decide them."""
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
