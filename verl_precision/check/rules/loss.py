"""Rules of the loss: aggregation, bypass mode, thresholds, weights."""

import math
from collections.abc import Iterator
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.files import table_of
from verl_precision.base.verl_config import ACTOR, BYPASS, CORRECTION, LOSS, engines, rollout_dtype
from verl_precision.check.rules.rule import Environment, Fault, Severity, faults_raised_by, rule
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.losses import settings as limits
from verl_precision.losses.registry import POLICY_LOSSES, ratio_of
from verl_precision.losses.rollout_weights import WEIGHT_KINDS
from verl_precision.mismatch.alarm import FEWEST
from verl_precision.mismatch.prediction import prediction_in_words, weighting_of

LOSS_CORRECTION = f"{ACTOR}.policy_loss.rollout_correction"
RATIO_SOURCE = f"{ACTOR}.fsdp_config.shadow.ratio_source"
MAX_USUAL_THRESHOLD = 10  # verl documents 1.5 to 10; YAML reads `1_5` and `2_10` as 15 and 210.
SYMMETRY = 0.01  # |log(lower x upper)| up to which a band counts as symmetric


def weighs_responses(config: DictConfig) -> bool:
    """Return whether the loss has importance weights, or gets some: only then there is an effective sample."""
    needs, given = _needs(config), _correction(config).get("rollout_is")
    return "rollout_log_probs" in needs or bool("rollout_is_weights" in needs and given)


@rule("normalizer-missing")
def normalizer_missing(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """seq-mean-token-sum-norm without its constant divides by the padded width of each micro-batch.

    A loss or an estimator of this package has the constant in its equation, and does not train without it. verl's own
    losses train, with gradients that depend on how a batch is cut: a warning.
    """
    actor = config.actor_rollout_ref.actor
    ours = _loss(config) in POLICY_LOSSES or OmegaConf.select(config, "hydra.runtime.choices.estimator")
    if actor.loss_agg_mode == limits.NORM_MODE:
        for fault in faults_raised_by(limits.require_normalizer, actor.get("loss_scale_factor")):
            yield replace(fault, severity="error" if ours else "warning")


@rule("kl-twice", "warning")
def kl_twice(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl has two places for the KL to the reference, and takes both."""
    actor, setting = config.actor_rollout_ref.actor, "algorithm.use_kl_in_reward"
    loss, reward = actor.get("kl_loss_coef"), OmegaConf.select(config, "algorithm.kl_ctrl.kl_coef")
    if actor.use_kl_loss and OmegaConf.select(config, setting) and loss and reward:
        yield Fault.worded("kl-twice", setting, reward=reward, loss=loss)


@rule("bypass-without-loss")
def bypass_without_loss(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """In the V1 trainer `bypass_mode` replaces the old log-probs; the correction's other settings have no effect."""
    if _takes_rollout_as_old(config) and (ignored := _ignored_in_bypass(config)):
        yield Fault.worded("bypass-without-loss", BYPASS, ignored=" and ".join(ignored))


@rule("setting-ignored", "warning")
def weights_unread_in_bypass(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """In bypass mode the V1 trainer computes no weights; a loss for this mode computes its own."""
    correction, loss = _correction(config), _loss(config)
    if loss in POLICY_LOSSES and "rollout_log_probs" in _needs(config):
        for key in ("rollout_is", "rollout_rs"):
            if correction.get(key) and config.trainer.get("use_v1", True):
                yield Fault.worded("setting-ignored/weights in bypass mode", f"{CORRECTION}.{key}", loss=loss)


@rule("bypass-clips-mismatch", "warning")
def bypass_clips_mismatch(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Bypass mode alone makes the clip act on the mismatch."""
    ratio, shadow = ratio_of(config.actor_rollout_ref.actor), OmegaConf.select(config, RATIO_SOURCE) == "shadow"
    clips = _takes_rollout_as_old(config) and (ratio is None or ratio.clip is not None) and not shadow
    if clips and not _ignored_in_bypass(config):
        yield Fault.worded("bypass-clips-mismatch", BYPASS, loss=_loss(config))


def _takes_rollout_as_old(config: DictConfig) -> bool:
    knows = _loss(config) == "bypass_mode" or "rollout_log_probs" in _needs(config)
    return bool(_correction(config).get("bypass_mode") and not knows and config.trainer.get("use_v1", True))


def _ignored_in_bypass(config: DictConfig) -> list[str]:
    correction = _correction(config)
    kind = correction.get("loss_type", "ppo_clip")
    asked = [key for key in ("rollout_is", "rollout_rs") if correction.get(key)]
    return asked if kind == "ppo_clip" else [*asked, f"loss_type={kind}"]


@rule("threshold-misread")
def threshold_misread(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """YAML reads `0.5_5` as 0.55, and `1e-9_3` as 1e-93. A single number below 1 is an empty k1 band."""
    for path, correction in _corrections(config).items():
        rejects, setting = correction.get("rollout_rs_threshold"), f"{path}.rollout_rs_threshold"
        if "k1" in str(correction.get("rollout_rs")) and isinstance(rejects, int | float) and not rejects > 1:
            yield Fault.worded("threshold-misread/k1", setting)
        value, kind = correction.get("rollout_is_threshold"), WEIGHT_KINDS.get(correction.get("rollout_is"))
        ours = kind is not None if path == CORRECTION else "threshold" in _needs(config)
        bounds, setting = kind.bounds if kind else limits.require_threshold, f"{path}.rollout_is_threshold"
        said = list(faults_raised_by(bounds, value, setting)) if ours else []
        yield from said  # this package's losses and weights have their own messages
        tells_mu = {"rollout_is_weights", "rejection_threshold"} <= _needs(config)  # the ratio, which weights nothing
        bounds_ratio = bounds is limits.require_threshold and correction.get("rollout_is") and not tells_mu
        if said or not bounds_ratio or not isinstance(value, int | float) or 1 <= value <= MAX_USUAL_THRESHOLD:
            continue
        severity: Severity = "error" if value < 1 else "warning"
        size = "small" if value < 1 else "large"
        yield Fault.worded(f"threshold-misread/{size}", setting, severity=severity, most=MAX_USUAL_THRESHOLD)


@rule("k1-bounds-inverted")
def k1_bounds_inverted(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """k1 is -log r, compared with [log lower, log upper]: a band keeps r in [1/upper, 1/lower]."""
    for path, correction in _corrections(config).items():
        modes, value = correction.get("rollout_rs"), correction.get("rollout_rs_threshold")
        if not modes or not isinstance(value, str):
            continue
        names, bands = ([part.strip() for part in str(text).split(",") if part.strip()] for text in (modes, value))
        for name, band in zip(names, bands * len(names) if len(bands) == 1 else bands, strict=False):
            bounds = _band(band)
            if not name.endswith("k1") or bounds is None or abs(math.log(bounds[0] * bounds[1])) <= SYMMETRY:
                continue
            (low, high), setting = bounds, f"{path}.rollout_rs_threshold"
            first, last = f"{1 / high:.4g}", float(f"{1 / low:.4g}")  # a float's point keeps the band text in YAML
            yield Fault.worded("k1-bounds-inverted", setting, name=name, low=low, high=high, first=first, last=last)


def _band(text: str) -> tuple[float, float] | None:
    try:
        low, high = map(float, text.split("_"))
    except ValueError:  # not a band; verl reports it when it parses the value
        return None
    return (low, high) if low > 0 and high > 0 else None


@rule("loss-settings")
def loss_settings(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Settings of this package's losses: the square of the gap, clip range, rejection threshold, and bypass mode."""
    needs, own, loss = _needs(config), _corrections(config)[LOSS_CORRECTION], _loss(config)
    if needs and (beta := config.actor_rollout_ref.actor.policy_loss.get("dro_beta")) is not None:
        yield from faults_raised_by(limits.require_gap_penalty, beta)
    if "clip_low" in needs:
        actor = config.actor_rollout_ref.actor
        yield from faults_raised_by(limits.require_clip_range, actor.clip_ratio_low, actor.clip_ratio_high)
    if "rejection_threshold" in needs:
        rejects = own.get("rollout_rs_threshold")
        yield from faults_raised_by(limits.require_divergence, rejects, limits.REJECTION_THRESHOLD)
    if "rollout_log_probs" not in needs:  # such a loss needs no bypass mode
        return
    if (bypass := _correction(config).get("bypass_mode", False)) is True:  # the worker reads a copy
        yield from faults_raised_by(limits.require_bypass, own.get("bypass_mode"), loss)
    else:
        yield Fault.worded("loss-settings/bypass", BYPASS, value=bypass, loss=loss, preset=loss.removeprefix("vp_"))
    if not config.trainer.get("use_v1", True):
        problem = f"in bypass mode verl's V0 trainer replaces loss_mode={loss} by its own bypass_mode"
        yield Fault("trainer.use_v1", problem, "True")


@rule("loss-settings")
def weights_not_applied(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Weights of this package need a loss that applies them, and a verl that leaves them as they are."""
    correction, weights = _correction(config), _correction(config).get("rollout_is")
    if weights not in WEIGHT_KINDS:
        return
    if "rollout_is_weights" not in _needs(config):
        applying = [name for name, entry in POLICY_LOSSES.items() if "rollout_is_weights" in entry.parameters]
        names, unfit = ", ".join(applying), _loss(config)
        yield Fault.worded("loss-settings/weights not applied", LOSS, value=unfit, weights=weights, applying=names)
    if correction.get("bypass_mode"):
        yield Fault.worded("loss-settings/weights in bypass mode", BYPASS, weights=weights)
    if correction.get("rollout_rs") is not None:
        yield Fault.worded("loss-settings/weights with rejection", f"{CORRECTION}.rollout_rs", weights=weights)
    yield from faults_raised_by(limits.require_plain_weights, correction.get("rollout_is_batch_normalize"), weights)


@rule("responses-too-long", "warning")
def responses_too_long(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A known model's k3 predicts what is left of the responses' weights at this length."""
    one, tokens = weighting_of(config), config.actor_rollout_ref.rollout.response_length
    dtypes = f"{engines(config)[0].compute} {rollout_dtype(config)}"
    for known in table_of(__file__, "known_gaps.yaml"):
        native = OmegaConf.select(config, ARITHMETIC_SETTING) in (None, "native")
        k3 = known["k3"].get(dtypes) if native and known["model"].items() <= environment.model.items() else None
        if k3 is not None and one.share(k3, tokens) < FEWEST:
            said, _, remedy = prediction_in_words(k3, tokens, one).rpartition(" Use ")
            problem = f"{said} This is a prediction; k3: {known['name']} ({known['source']})"
            yield Fault("data.max_response_length", problem, "shorter responses", f"Use {remedy}")


def _loss(config: DictConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")


def _needs(config: DictConfig) -> frozenset[str]:
    """Return the parameters of the chosen loss if it is one of this package, otherwise nothing."""
    entry = POLICY_LOSSES.get(_loss(config))
    return frozenset() if entry is None else entry.parameters


def _correction(config: DictConfig) -> DictConfig:
    return config.algorithm.get("rollout_correction") or DictConfig({})


def _corrections(config: DictConfig) -> dict[str, DictConfig]:
    """Return verl's own block of settings, and the loss's copy, by their names."""
    return {path: OmegaConf.select(config, path) or DictConfig({}) for path in (CORRECTION, LOSS_CORRECTION)}
