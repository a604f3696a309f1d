"""Rules that are rows of tables.yaml: numbers, names, settings that nothing reads, lengths, what has to repeat."""

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT, long
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.verl_config import SEEDED, engines, is_repeatable, rollout_dtype, uses_adapter
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rule import Environment, Fault, Faults, Severity, rule, told
from verl_precision.check.who_decides import USERS, preset_of, speaker_of
from verl_precision.engine.arithmetic_choice import FAMILIES, IN_CONFIG, beyond_merging, refused, require_family
from verl_precision.integration.ledger import EXPERTS, is_offered
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

MANY_TIMES = 10  # a normaliser that is further from the longest response is a slip


@functools.cache
def table(name: str) -> list:
    """Return the rows of a table of tables.yaml."""
    return table_of(__file__)[name]


def null_number(config: DictConfig) -> str | None:
    """Return the first setting that is null where verl, rules and resolvers compute with it; asked before them."""
    for setting, *condition in table("numbers"):
        if OmegaConf.select(config, setting, default=0) is None and _is_read(config, condition):
            return setting
    return None


@rule("value-out-of-range")
def refused_numbers(config: DictConfig, environment: Environment) -> Faults:
    """Numbers that fail in a request, an assertion or a constructor, after everything is loaded."""
    for setting, interval, effect, *condition in table("refused"):
        value = OmegaConf.select(config, setting)
        _, whole, bounds = interval.rpartition("whole ")
        if (value is None and not whole) or not _is_read(config, condition) or _is_within(value, bounds, bool(whole)):
            continue
        yield told("value-out-of-range", setting=setting, effect=effect, whole=whole, bounds=bounds)


@rule("value-unusual", "warning")
def unusual_numbers(config: DictConfig, environment: Environment) -> Faults:
    """Numbers that are orders of magnitude from those in use."""
    longest, usual = config.data.max_response_length, [*table("usual")]
    if config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm":
        setting, source = "actor_rollout_ref.actor.loss_scale_factor", "arXiv 2503.20783: data.max_response_length"
        usual.append([setting, longest / MANY_TIMES, longest * MANY_TIMES, source])
    for setting, low, high, source, *otherwise in usual:
        value = OmegaConf.select(config, setting)
        if otherwise and _is_read(config, otherwise):
            continue
        if isinstance(value, int | float) and value and not low <= value <= high:
            yield told("value-unusual", setting=setting, source=source, low=low, high=high)


@rule("name-unknown")
def unknown_names(config: DictConfig, environment: Environment) -> Faults:
    """Names that are looked up in a worker only."""
    for setting, known, effect, *condition in table("names"):
        allowed = [*known, *(WEIGHT_KINDS if setting.endswith(".rollout_is") else ())]
        given = ",".join(str(name) for name in names_in(config, setting) if name)
        # a name with a slash is a kernel of the Hugging Face hub
        wrong = [name for name in given.replace(" ", "").split(",") if name not in ("", *allowed) and "/" not in name]
        if wrong and _is_read(config, condition):
            # agent loops are the only ones that a user's module may add to
            severity: Severity = "warning" if setting.endswith("_loop") else "error"
            said = {"wrong": ", ".join(wrong), "effect": effect, "allowed": ", ".join(allowed)}
            yield told("name-unknown", setting=setting, severity=severity, **said)


@rule("setting-ignored", "warning")
def ignored_settings(config: DictConfig, environment: Environment) -> Faults:
    """Settings that were changed from verl's default where nothing reads them; not where that changes nothing."""
    for setting, default, other, word, meant, reason, *condition in table("ignored"):
        value, decides = OmegaConf.select(config, setting), OmegaConf.select(config, other)
        same = default if isinstance(default, list) and not OmegaConf.is_list(value) else [default]
        alike = value == decides and not isinstance(decides, bool)  # a clip range and its two bounds; 1 is no True
        meets = (decides == meant) is word.startswith("where") and _is_read(config, condition)
        if not meets or value is None or value in same or alike or not (speaker := speaker_of(config, setting)):
            continue
        if speaker not in USERS and preset_of(config, other):  # preset-overruled says it
            continue
        if "unsaid" not in word or speaker != speaker_of(config, other):
            yield told("setting-ignored", setting=setting, reason=reason, default=same[0])


@rule("lengths-differ")
def lengths_differ(config: DictConfig, environment: Environment) -> Faults:
    """The rollout's own lengths stand beside those of `data`, from which verl and the presets derive the rest."""
    for key, source, effect in table("lengths"):
        own, meant = config.actor_rollout_ref.rollout.get(key), config.data[source]
        numbers = isinstance(own, int | float) and isinstance(meant, int | float)
        if numbers and (own < meant or own > meant and key == "response_length"):
            yield told("lengths-differ", key=key, source=source, meant=meant, effect=effect)


@rule("not-repeatable")
def not_repeatable(config: DictConfig, environment: Environment) -> Faults:
    """A run that seeds each request is meant to repeat: everything else that chance decides must be fixed too."""
    if not is_repeatable(config):
        return
    asked = f"{SEEDED}=True asks for a run that repeats bit for bit, but"
    yield from _unlike(config, "fixed", asked, "as +repeatable=bitwise does")
    if config.data.shuffle and config.data.seed is None:
        yield told("not-repeatable", asked=asked)


@rule("not-exact", about="operations of exact arithmetic")
def not_exact(config: DictConfig, environment: Environment) -> Faults:
    """A run with exact arithmetic is meant to have no gap: nothing may round otherwise in one engine alone."""
    if (arithmetic := OmegaConf.select(config, IN_CONFIG)) != EXACT:
        return
    asked, remedy = f"arithmetic={arithmetic} asks for equal log-probs, but", "or choose arithmetic=native"
    yield from _unlike(config, "exact", asked, remedy)
    for engine in engines(config):
        yield from _unlike(config, "exact engine", asked, remedy, f"{engine.setting}.")
        if engine.ulysses[1] > 1:
            yield told("not-exact ulysses", engine=engine, asked=asked)
    models = [("actor_rollout_ref.model", environment.model), ("critic.model", environment.critic)]
    for setting, model in models:
        if refusal := _model_refusal(model, bool(OmegaConf.select(config, f"{setting}.trust_remote_code"))):
            yield told("not-exact model", setting=f"{setting}.path", asked=asked, refusal=refusal)
    moe = environment.model.get("model_type", "").endswith("_moe")
    if moe and environment.vllm and not is_offered(*EXPERTS, environment.vllm):
        yield told("not-exact experts", asked=asked, vllm=environment.vllm)
    if uses_adapter(config):
        yield told("not-exact adapter", asked=asked)
    if others := beyond_merging(environment.adapter):
        yield told("not-exact merge", asked=asked, others=others)
    if (trained := engines(config)[0].compute) != rollout_dtype(config):
        yield told("not-exact dtype", asked=asked, trained=trained, needed=long(trained))


def _model_refusal(model: Mapping[str, Any], brings_code: bool) -> ConfigurationError | None:
    """Return why a model, by its `config.json`, has operations that are not rounded once; None also if it has none."""
    from transformers import AutoConfig

    if not (kind := model.get("model_type")):
        return None
    try:
        if model.get("quantization_config"):
            raise refused("the model's weights are quantised", "weights of 16 or 32 bits")
        if brings_code and model.get("auto_map"):
            raise refused("the model brings modules of its own", "trust_remote_code=False")
        require_family(AutoConfig.for_model(**model) if kind in FAMILIES else SimpleNamespace(model_type=kind))
    except ConfigurationError as error:
        return error
    return None


def _unlike(config: DictConfig, name: str, asked: str, remedy: str, place: str = "") -> Faults:
    """Yield the settings of a table (setting, what it may be, why) that have another value."""
    for setting, needed, differs in table(name):
        if OmegaConf.select(config, place + setting) not in needed:
            allowed = ["null" if value is None else str(value) for value in needed]
            remedy_here = f"Set {place}{setting}={allowed[-1]}, {remedy}."
            yield Fault("", "", place + setting, None, f"{asked} {differs}", " or ".join(allowed), remedy_here)


def _is_read(config: DictConfig, condition: list) -> bool:
    """Return whether each setting that a row names has the value with which verl reads the row's."""
    return all(OmegaConf.select(config, name) == value for name, value in zip(*[iter(condition)] * 2, strict=True))


def _is_within(value: object, interval: str, whole: bool) -> bool:
    """Return whether a value is a number, or a whole one, in an interval, such as `(0, 1]`."""
    low, high = map(float, interval[1:-1].split(","))
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return (low < value < high) or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
