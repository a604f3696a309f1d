"""Rules of the loss: aggregation, bypass mode, thresholds, weights."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.rollout_weights import WEIGHTS
from verl_precision.losses.settings import (
    NORM_MODE,
    THRESHOLD,
    WEIGHT_THRESHOLD,
    require_bypass,
    require_clip_range,
    require_normalizer,
    require_plain_weights,
    require_threshold,
)
from verl_precision.rules.rule import Case, Environment, refused, rule

CORRECTION = "algorithm.rollout_correction"
LOSS_CORRECTION = "actor_rollout_ref.actor.policy_loss.rollout_correction"
# Beyond verl's documented 1.5 to 10; `1_5` and `2_10` are read as 15 and 210.
MAX_USUAL_THRESHOLD = 10
# log(lower x upper) of a band that is the same both ways round
SYMMETRY = 0.01
VERLS_CLIP_RATIO_C = 3.0


@rule("normalizer-missing")
def normalizer_missing(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """seq-mean-token-sum-norm without its constant divides by the padded width of each micro-batch."""
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode == NORM_MODE:
        yield from refused(require_normalizer, actor.get("loss_scale_factor"))


@rule(
    "bypass-loss-unconfigured",
    setting=LOSS_CORRECTION,
    problem="loss_mode=bypass_mode reads its settings there and raises in the first update without them.",
    allowed="a RolloutCorrectionConfig",
    remedy=f"Choose estimator=pg_seq_tis or pg_seq_mis, or set +{LOSS_CORRECTION}.*.",
)
def bypass_loss_unconfigured(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl's own loss for bypass mode needs a block of settings."""
    if _loss(config) == "bypass_mode" and OmegaConf.select(config, LOSS_CORRECTION) is None:
        yield {}


@rule(
    "bypass-without-loss",
    setting=f"{CORRECTION}.bypass_mode",
    problem="verl's V1 trainer ignores {ignored} here: loss_mode={loss} runs with the rollout's log-probs as the old "
    "ones, so the clip acts on the mismatch.",
    allowed="False, or a loss that knows bypass mode",
    remedy="Choose estimator=pg_seq_is, pg_seq_tis or pg_seq_mis.",
)
def bypass_without_loss(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """`bypass_mode` swaps the old log-probs, and in the V1 trainer nothing else of what was asked for."""
    if _clips_the_mismatch(config) and (ignored := _ignored_in_bypass(config)):
        yield {"ignored": " and ".join(ignored), "loss": _loss(config)}


@rule(
    "bypass-clips-mismatch",
    "warning",
    setting=f"{CORRECTION}.bypass_mode",
    problem="loss_mode={loss} clips the ratio to the rollout's log-probs, which contains the mismatch: tokens are "
    "clipped for their rounding. verl logs no mismatch metric in this mode.",
    allowed="False, or a loss that knows bypass mode",
    remedy="Set it to False, or choose estimator=pg_seq_is.",
)
def bypass_clips_mismatch(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Bypass mode alone makes the clip act on the mismatch."""
    if _clips_the_mismatch(config) and not _ignored_in_bypass(config):
        yield {"loss": _loss(config)}


def _clips_the_mismatch(config: DictConfig) -> bool:
    knows = _loss(config) == "bypass_mode" or "rollout_log_probs" in _needs(config)
    return bool(_correction(config).get("bypass_mode") and not knows and config.trainer.get("use_v1", True))


def _ignored_in_bypass(config: DictConfig) -> list[str]:
    correction = _correction(config)
    kind = correction.get("loss_type", "ppo_clip")
    asked = [key for key in ("rollout_is", "rollout_rs") if correction.get(key)]
    return asked if kind == "ppo_clip" else [*asked, f"loss_type={kind}"]


@rule("threshold-misread")
def own_threshold(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """C of a loss, or of weights, of this package."""
    if "threshold" in _needs(config):
        yield from refused(require_threshold, _loss_correction(config).get("rollout_is_threshold"), THRESHOLD)
    if _correction(config).get("rollout_is") in WEIGHTS:
        yield from refused(require_threshold, _correction(config).get("rollout_is_threshold"), WEIGHT_THRESHOLD)


@rule(
    "threshold-misread",
    setting="{path}.rollout_is_threshold",
    problem="{effect}. YAML reads a band such as 0.5_5 as the number 0.55, 1e-9_3 as 1e-93 and 2_10 as 210.",
    allowed=f"a number in [1, {MAX_USUAL_THRESHOLD}], or a band whose parts have a decimal point, as 0.5_5.0",
    remedy="Set {path}.rollout_is_threshold=2.0, or write the band as 0.5_5.0.",
)
def threshold_misread(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """`0.5_5` is a number to YAML: 0.55. So is `1e-9_3`: 1e-93."""
    said = {fault.setting for fault in own_threshold.faults(config, environment)}
    for path, correction in ((CORRECTION, _correction(config)), (LOSS_CORRECTION, _loss_correction(config))):
        value = correction.get("rollout_is_threshold")
        if (
            not correction.get("rollout_is")
            or not isinstance(value, int | float)
            or f"{path}.rollout_is_threshold" in said
        ):
            continue
        if value < 1:
            yield {"path": path, "effect": "it would truncate weights of on-policy tokens (ratio 1)"}
        elif value > MAX_USUAL_THRESHOLD:
            yield {"path": path, "effect": "it hardly ever acts", "severity": "warning"}


@rule(
    "threshold-misread",
    setting="{path}.rollout_rs_threshold",
    problem="one number is the upper bound of a k1 band whose lower bound is its reciprocal: below 1 the band is empty "
    "and everything is rejected. YAML reads 0.5_5 as the number 0.55.",
    allowed="a number > 1, or a band whose parts have a decimal point, as 0.5_2.0",
    remedy="Set {path}.rollout_rs_threshold=2.0.",
)
def rejection_threshold_misread(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """One number below 1 is an empty k1 band."""
    for path, correction in ((CORRECTION, _correction(config)), (LOSS_CORRECTION, _loss_correction(config))):
        value = correction.get("rollout_rs_threshold")
        if "k1" in (correction.get("rollout_rs") or "") and isinstance(value, int | float) and not value > 1:
            yield {"path": path}


@rule(
    "k1-bounds-inverted",
    setting="{path}.rollout_rs_threshold",
    problem="{name} compares -log r with the logarithms of the bounds, so that ratios in {kept} are kept, not "
    "[{low:g}, {high:g}].",
    allowed="a band that is the same both ways round, as 0.5_2.0, or the reciprocals of the bounds meant",
    remedy="To keep [{low:g}, {high:g}] set {path}.rollout_rs_threshold={wanted}.",
)
def k1_bounds_inverted(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """k1 is -log r, compared with [log lower, log upper]: a band keeps r in [1/upper, 1/lower]."""
    for path, correction in ((CORRECTION, _correction(config)), (LOSS_CORRECTION, _loss_correction(config))):
        modes, value = correction.get("rollout_rs"), correction.get("rollout_rs_threshold")
        if not modes or not isinstance(value, str):
            continue
        names = [name.strip() for name in str(modes).split(",") if name.strip()]
        bands = [band.strip() for band in value.split(",") if band.strip()]
        for name, band in zip(names, bands * len(names) if len(bands) == 1 else bands, strict=False):
            bounds = _band(band)
            if not name.endswith("k1") or bounds is None or abs(math.log(bounds[0] * bounds[1])) <= SYMMETRY:
                continue
            low, high = bounds
            kept = f"[{1 / high:.4g}, {1 / low:.4g}]"
            wanted = f"{1 / high:.4g}_{float(f'{1 / low:.4g}')}"
            yield {"path": path, "name": name, "low": low, "high": high, "kept": kept, "wanted": wanted}


@rule(
    "clip-ratio-c-ignored",
    "warning",
    setting="actor_rollout_ref.actor.clip_ratio_c",
    problem="loss_mode={loss} has no dual clip; only verl's vanilla does.",
    allowed=f"{VERLS_CLIP_RATIO_C} (verl's default, not read)",
    remedy="Remove the setting, or choose estimator=dapo.",
)
def clip_ratio_c_ignored(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The losses of this package have no dual clip; a value set for it does nothing."""
    value = config.actor_rollout_ref.actor.get("clip_ratio_c", VERLS_CLIP_RATIO_C)
    if _loss(config) in POLICY_LOSSES and value != VERLS_CLIP_RATIO_C:
        yield {"loss": _loss(config)}


@rule("check_estimator")
def clip_range(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The clip range of a loss of this package."""
    if "clip_low" in _needs(config):
        actor = config.actor_rollout_ref.actor
        yield from refused(require_clip_range, actor.clip_ratio_low, actor.clip_ratio_high)


@rule(
    "check_estimator",
    setting=f"{CORRECTION}.bypass_mode",
    problem="loss_mode={loss} weighs by the rollout's log-probs; verl would recompute the old ones with the trainer.",
    allowed="True",
    remedy="Choose the preset estimator={loss}, which sets it and its copy in actor.policy_loss.",
)
def bypass_off(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """A loss that weighs by the rollout's log-probs gets them in bypass mode only."""
    if "rollout_log_probs" in _needs(config) and _correction(config).get("bypass_mode") is not True:
        yield {"loss": _loss(config), "value": _correction(config).get("bypass_mode", False)}


@rule("check_estimator")
def bypass_unsaid(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """A copy of the setting tells the worker whose log-probs it is given."""
    if "rollout_log_probs" in _needs(config) and _correction(config).get("bypass_mode") is True:
        yield from refused(require_bypass, _loss_correction(config).get("bypass_mode"), _loss(config))


@rule(
    "check_estimator",
    setting="trainer.use_v1",
    problem="in bypass mode verl's V0 trainer replaces loss_mode={loss} by its own bypass_mode.",
    allowed="True",
    remedy="Set trainer.use_v1=True.",
)
def first_trainer(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """verl's V0 trainer has a loss of its own for bypass mode."""
    if "rollout_log_probs" in _needs(config) and not config.trainer.get("use_v1", True):
        yield {"loss": _loss(config)}


@rule(
    "check_estimator",
    setting="actor_rollout_ref.actor.policy_loss.loss_mode",
    problem=f"this loss does not apply the weights {CORRECTION}.rollout_is={{weights}} as the equation says.",
    allowed="{takers}",
    remedy="Set actor_rollout_ref.actor.policy_loss.loss_mode=grpo.",
)
def weights_ignored(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Weights of this package need a loss that applies them."""
    if (weights := _own_weights(config)) and "rollout_is_weights" not in _needs(config):
        takers = [name for name, entry in POLICY_LOSSES.items() if "rollout_is_weights" in entry.parameters]
        yield {"weights": weights, "takers": ", ".join(takers), "value": _loss(config)}


@rule(
    "check_estimator",
    setting=f"{CORRECTION}.bypass_mode",
    problem="in bypass mode verl makes no weights rollout_is={weights}, without a word.",
    allowed="False",
    remedy="Set it to False, or choose estimator=pg_seq_tis or pg_seq_mis, which need no old-log-prob forward.",
)
def weights_in_bypass(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Bypass mode makes no weights."""
    if (weights := _own_weights(config)) and _correction(config).get("bypass_mode"):
        yield {"weights": weights}


@rule(
    "check_estimator",
    setting=f"{CORRECTION}.rollout_rs",
    problem="with rollout_is={weights} it takes rejected tokens out of the mask, so that they leave the denominator.",
    allowed="null",
    remedy="Set it to null.",
)
def weights_and_rejection(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Rejection by verl changes the mask, and with it the denominator."""
    if (weights := _own_weights(config)) and _correction(config).get("rollout_rs") is not None:
        yield {"weights": weights}


@rule("check_estimator")
def weights_normalised(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Normalised weights are not those of the equation."""
    if weights := _own_weights(config):
        yield from refused(require_plain_weights, _correction(config).get("rollout_is_batch_normalize"), weights)


def _loss(config: DictConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")


def _needs(config: DictConfig) -> frozenset[str]:
    """Return what the chosen loss is called with, if it is one of this package."""
    entry = POLICY_LOSSES.get(_loss(config))
    return frozenset() if entry is None else entry.parameters


def _own_weights(config: DictConfig) -> str | None:
    level = _correction(config).get("rollout_is")
    return level if level in WEIGHTS else None


def _correction(config: DictConfig) -> DictConfig:
    return config.algorithm.get("rollout_correction") or DictConfig({})


def _loss_correction(config: DictConfig) -> DictConfig:
    return config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or DictConfig({})


def _band(text: str) -> tuple[float, float] | None:
    parts = text.split("_")
    try:
        low, high = (float(part) for part in parts)
    except ValueError:  # not a band; verl says so itself when it parses it
        return None
    return (low, high) if low > 0 and high > 0 else None
