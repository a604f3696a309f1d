"""Rules of the loss: aggregation, bypass mode, thresholds, weights."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import DTYPES
from verl_precision.base.verl_config import engines, rollout_dtype
from verl_precision.check.rules.rule import Environment, Fault, Faults, Severity, as_fault, as_faults, rule, told
from verl_precision.losses import settings as limits
from verl_precision.losses.registry import POLICY_LOSSES, ratio_of
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

CORRECTION = "algorithm.rollout_correction"
LOSS_CORRECTION = "actor_rollout_ref.actor.policy_loss.rollout_correction"
RATIO_SOURCE = "actor_rollout_ref.actor.fsdp_config.shadow.ratio_source"
MAX_USUAL_THRESHOLD = 10  # Beyond verl's documented 1.5 to 10; `1_5` and `2_10` are read as 15 and 210.
SYMMETRY = 0.01  # log(lower x upper) of a band that is the same both ways round
VERLS_CLIP_RATIO_C = 3.0
ONE_CLIP = ("clip_cov", "cispo", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo")  # verl's that do not read it
TYPICAL_WEIGHT = 0.02  # in size, of a language model


def weighs_responses(config: DictConfig) -> bool:
    """Whether the loss has importance weights, or is given some: an effective sample is one of them."""
    ours = POLICY_LOSSES.get(_loss(config) or "vanilla")
    needs = frozenset() if ours is None else ours.parameters
    given = "rollout_is_weights" in needs and OmegaConf.select(config, "algorithm.rollout_correction.rollout_is")
    return bool(given) or "rollout_log_probs" in needs


@rule("normalizer-missing")
def normalizer_missing(config: DictConfig, environment: Environment) -> Faults:
    """seq-mean-token-sum-norm without its constant divides by the padded width of each micro-batch.

    A loss or an estimator of this package has the constant in its equation, and refuses to train without. verl's own
    losses train, with gradients that depend on how a batch is cut: a warning.
    """
    actor = config.actor_rollout_ref.actor
    ours = _loss(config) in POLICY_LOSSES or OmegaConf.select(config, "hydra.runtime.choices.estimator")
    if actor.loss_agg_mode == limits.NORM_MODE:
        for error in as_faults(limits.require_normalizer, actor.get("loss_scale_factor")):
            yield as_fault(error, severity="error" if ours else "warning")


@rule("kl-twice", "warning")
def kl_twice(config: DictConfig, environment: Environment) -> Faults:
    """verl has two places for the KL to the reference, and takes both."""
    actor, setting = config.actor_rollout_ref.actor, "algorithm.use_kl_in_reward"
    penalties = actor.get("kl_loss_coef"), OmegaConf.select(config, "algorithm.kl_ctrl.kl_coef")
    if actor.use_kl_loss and OmegaConf.select(config, setting) and all(penalties):
        loss, reward = penalties
        yield Fault(
            setting=setting,
            problem=f"the KL to the reference counts twice: in the reward (x {reward}) and the loss (x {loss})",
            allowed="one of the two",
            remedy=f"Set {setting}=False, or set actor_rollout_ref.actor.use_kl_loss=False.",
        )


@rule("bypass-loss-unconfigured")
def bypass_loss_unconfigured(config: DictConfig, environment: Environment) -> Faults:
    """verl's own loss for bypass mode needs a block of settings."""
    if _loss(config) == "bypass_mode" and OmegaConf.select(config, LOSS_CORRECTION) is None:
        yield told("bypass-loss-unconfigured")


@rule("bypass-without-loss")
def bypass_without_loss(config: DictConfig, environment: Environment) -> Faults:
    """`bypass_mode` swaps the old log-probs, and in the V1 trainer nothing else of what was asked for."""
    if _takes_rollout_as_old(config) and (ignored := _ignored_in_bypass(config)):
        yield told("bypass-without-loss", ignored=" and ".join(ignored))


@rule("setting-ignored", "warning")
def weights_unread_in_bypass(config: DictConfig, environment: Environment) -> Faults:
    """In bypass mode the V1 trainer leaves out the step that makes weights; a loss that knows the mode has its own."""
    correction, loss = _correction(config), _loss(config)
    if loss in POLICY_LOSSES and "rollout_log_probs" in _needs(config):
        for key in ("rollout_is", "rollout_rs"):
            if correction.get(key) and config.trainer.get("use_v1", True):
                problem = f"nothing reads it in bypass mode, which loss_mode={loss} needs: it uses the log-probs itself"
                setting = f"{CORRECTION}.{key}"
                yield Fault(setting=setting, problem=problem, allowed="null", remedy=f"Leave out {setting}.")


@rule("bypass-clips-mismatch", "warning")
def bypass_clips_mismatch(config: DictConfig, environment: Environment) -> Faults:
    """Bypass mode alone makes the clip act on the mismatch."""
    if _has_mismatch_in_clip(config) and not _ignored_in_bypass(config):
        yield told("bypass-clips-mismatch", loss=_loss(config))


@rule("updates-below-grid", "warning")
def updates_below_grid(config: DictConfig, environment: Environment) -> Faults:
    """The trainer's weights move at once, the rollout's rounded ones do not, and the clip cuts what has been learnt."""
    actor, rollout = engines(config)[0], rollout_dtype(config)
    learning_rate = (actor.optim or {}).get("lr", 0)
    if rollout not in DTYPES or actor.compute not in DTYPES or not learning_rate:
        return
    bits = DTYPES[rollout].bits
    if DTYPES[actor.compute].bits <= bits:
        return
    if _has_mismatch_in_clip(config):
        step = TYPICAL_WEIGHT * 2 ** -(bits + 0.5)  # half the distance of two neighbours, on average
        yield told(
            "updates-below-grid", actor=actor, rollout=rollout, typical_weight=TYPICAL_WEIGHT, step=step,
            updates=step / learning_rate, learning_rate=learning_rate,
        )  # fmt: skip


def _has_mismatch_in_clip(config: DictConfig) -> bool:
    """Return whether the loss clips a ratio of which the mismatch is a part."""
    ratio = ratio_of(config.actor_rollout_ref.actor)
    clips = ratio is None or ratio.clip is not None
    return _takes_rollout_as_old(config) and clips and OmegaConf.select(config, RATIO_SOURCE) != "shadow"


def _takes_rollout_as_old(config: DictConfig) -> bool:
    knows = _loss(config) == "bypass_mode" or "rollout_log_probs" in _needs(config)
    return bool(_correction(config).get("bypass_mode") and not knows and config.trainer.get("use_v1", True))


def _ignored_in_bypass(config: DictConfig) -> list[str]:
    correction = _correction(config)
    kind = correction.get("loss_type", "ppo_clip")
    asked = [key for key in ("rollout_is", "rollout_rs") if correction.get(key)]
    return asked if kind == "ppo_clip" else [*asked, f"loss_type={kind}"]


@rule("threshold-misread")
def weight_threshold_misread(config: DictConfig, environment: Environment) -> Faults:
    """`0.5_5` is a number to YAML: 0.55. So is `1e-9_3`: 1e-93."""
    # this package's losses and weights say it in their own words
    own = {
        LOSS_CORRECTION: (limits.THRESHOLD, "threshold" in _needs(config)),
        CORRECTION: (limits.WEIGHT_THRESHOLD, _correction(config).get("rollout_is") in WEIGHT_KINDS),
    }
    for path, correction in _corrections(config):
        value, (setting, ours) = correction.get("rollout_is_threshold"), own[path]
        level = WEIGHT_KINDS.get(correction.get("rollout_is"))
        bounds = level.bounds if level else limits.require_threshold
        said = list(as_faults(bounds, value, setting)) if ours else []
        yield from said
        bounds_ratio = bounds is limits.require_threshold and correction.get("rollout_is")
        if said or not bounds_ratio or not isinstance(value, int | float):
            continue
        if value < 1 or value > MAX_USUAL_THRESHOLD:
            effect = "would truncate weights of on-policy tokens (ratio 1)" if value < 1 else "hardly ever acts"
            severity: Severity = "error" if value < 1 else "warning"
            yield told(
                "threshold-misread weights", severity=severity, path=path, effect=effect,
                max_usual_threshold=MAX_USUAL_THRESHOLD,
            )  # fmt: skip


@rule("threshold-misread")
def rejection_threshold_misread(config: DictConfig, environment: Environment) -> Faults:
    """One number below 1 is an empty k1 band."""
    for path, correction in _corrections(config):
        value = correction.get("rollout_rs_threshold")
        if "k1" in str(correction.get("rollout_rs")) and isinstance(value, int | float) and not value > 1:
            yield told("threshold-misread k1", path=path)


@rule("k1-bounds-inverted")
def k1_bounds_inverted(config: DictConfig, environment: Environment) -> Faults:
    """k1 is -log r, compared with [log lower, log upper]: a band keeps r in [1/upper, 1/lower]."""
    for path, correction in _corrections(config):
        modes, value = correction.get("rollout_rs"), correction.get("rollout_rs_threshold")
        if not modes or not isinstance(value, str):
            continue
        names, bands = ([part.strip() for part in str(text).split(",") if part.strip()] for text in (modes, value))
        for name, band in zip(names, bands * len(names) if len(bands) == 1 else bands, strict=False):
            bounds = _band(band)
            if not name.endswith("k1") or bounds is None or abs(math.log(bounds[0] * bounds[1])) <= SYMMETRY:
                continue
            low, high = bounds
            kept = (f"{1 / high:.4g}", f"{1 / low:.4g}", float(f"{1 / low:.4g}"))
            yield told("k1-bounds-inverted", path=path, name=name, kept=kept, low=low, high=high)


def _band(text: str) -> tuple[float, float] | None:
    try:
        low, high = map(float, text.split("_"))
    except ValueError:  # not a band; verl says so itself when it parses it
        return None
    return (low, high) if low > 0 and high > 0 else None


@rule("clip-ratio-c-ignored", "warning")
def clip_ratio_c_ignored(config: DictConfig, environment: Environment) -> Faults:
    """Most losses have no dual clip; a value set for it does nothing."""
    value = config.actor_rollout_ref.actor.get("clip_ratio_c", VERLS_CLIP_RATIO_C)
    if _loss(config) in (*POLICY_LOSSES, *ONE_CLIP) and value != VERLS_CLIP_RATIO_C:
        yield told("clip-ratio-c-ignored", loss=_loss(config), verls_clip_ratio_c=VERLS_CLIP_RATIO_C)


@rule("loss-settings")
def clip_range(config: DictConfig, environment: Environment) -> Faults:
    """The clip range of a loss of this package, and its threshold of rejection."""
    if "clip_low" in _needs(config):
        actor = config.actor_rollout_ref.actor
        yield from as_faults(limits.require_clip_range, actor.clip_ratio_low, actor.clip_ratio_high)
    if "rejection_threshold" in _needs(config):
        value = _loss_correction(config).get("rollout_rs_threshold")
        yield from as_faults(limits.require_divergence, value, limits.REJECTION_THRESHOLD)


@rule("loss-settings")
def loss_without_bypass(config: DictConfig, environment: Environment) -> Faults:
    """A loss that weighs by the rollout's log-probs gets them in bypass mode of verl's V1 trainer only."""
    if "rollout_log_probs" not in _needs(config):
        return
    loss, bypass = _loss(config), _correction(config).get("bypass_mode", False)
    if bypass is True:  # a copy of the setting tells the worker whose log-probs it is given
        yield from as_faults(limits.require_bypass, _loss_correction(config).get("bypass_mode"), loss)
    else:
        yield told("loss-settings bypass", value=bypass, loss=loss, preset=loss.removeprefix("vp_"))
    if not config.trainer.get("use_v1", True):
        yield told("loss-settings v0", loss=loss)


@rule("loss-settings")
def weights_not_applied(config: DictConfig, environment: Environment) -> Faults:
    """Weights of this package need a loss that applies them, and a verl that leaves them as they are."""
    correction, weights = _correction(config), _correction(config).get("rollout_is")
    if weights not in WEIGHT_KINDS:
        return
    if "rollout_is_weights" not in _needs(config):
        applying = [name for name, entry in POLICY_LOSSES.items() if "rollout_is_weights" in entry.parameters]
        yield told("loss-settings loss", value=_loss(config), weights=weights, applying=", ".join(applying))
    if correction.get("bypass_mode"):
        yield told("loss-settings weights in bypass", weights=weights)
    if correction.get("rollout_rs") is not None:
        yield told("loss-settings rejection", weights=weights)
    yield from as_faults(limits.require_plain_weights, correction.get("rollout_is_batch_normalize"), weights)


def _loss(config: DictConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")


def _needs(config: DictConfig) -> frozenset[str]:
    """Return what the chosen loss is called with, if it is one of this package."""
    entry = POLICY_LOSSES.get(_loss(config))
    return frozenset() if entry is None else entry.parameters


def _correction(config: DictConfig) -> DictConfig:
    return config.algorithm.get("rollout_correction") or DictConfig({})


def _loss_correction(config: DictConfig) -> DictConfig:
    return config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or DictConfig({})


def _corrections(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    yield CORRECTION, _correction(config)
    yield LOSS_CORRECTION, _loss_correction(config)
