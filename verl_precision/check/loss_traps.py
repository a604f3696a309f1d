"""Traps of the loss: aggregation, bypass mode, thresholds. Pure functions of a composed config."""

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from verl_precision.aggregation import NORM_MODE
from verl_precision.check.fault import Environment, Fault
from verl_precision.losses.registry import POLICY_LOSSES

CORRECTION = "algorithm.rollout_correction"
# Beyond verl's documented 1.5 to 10; `1_5` and `2_10` are read as 15 and 210.
MAX_USUAL_THRESHOLD = 10
# log(lower x upper) of a band that is the same both ways round
SYMMETRY = 0.01
VERLS_CLIP_RATIO_C = 3.0


def normalizer_missing(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """seq-mean-token-sum-norm without its constant divides by the padded width of each micro-batch."""
    actor = config.actor_rollout_ref.actor
    if _loss(config) in POLICY_LOSSES:  # check_estimator asks it of those
        return
    if actor.loss_agg_mode == NORM_MODE and actor.get("loss_scale_factor") is None:
        yield Fault(
            "normalizer-missing",
            "error",
            "actor_rollout_ref.actor.loss_scale_factor",
            None,
            f"with loss_agg_mode={NORM_MODE} verl divides by the padded width of the micro-batch at hand, so the "
            "gradient changes with how the batch is cut.",
            "a constant > 0",
            "Set actor_rollout_ref.actor.loss_scale_factor='${data.max_response_length}'.",
        )


def bypass_without_loss(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """`bypass_mode` swaps the old log-probs, and in the V1 trainer nothing else of what was asked for."""
    correction = config.algorithm.get("rollout_correction") or {}
    loss = _loss(config)
    takes_rollout = loss in POLICY_LOSSES and "rollout_log_probs" in POLICY_LOSSES[loss].parameters
    if loss == "bypass_mode":
        if config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") is None:
            yield Fault(
                "bypass-loss-unconfigured",
                "error",
                "actor_rollout_ref.actor.policy_loss.rollout_correction",
                None,
                "loss_mode=bypass_mode reads its settings there and raises in the first update without them.",
                "a RolloutCorrectionConfig",
                "Choose estimator=pg_seq_tis or pg_seq_mis, or set "
                "+actor_rollout_ref.actor.policy_loss.rollout_correction.*.",
            )
        return
    if not correction.get("bypass_mode") or takes_rollout or not config.trainer.get("use_v1", True):
        return
    asked = [key for key in ("rollout_is", "rollout_rs") if correction.get(key)]
    kind = correction.get("loss_type", "ppo_clip")
    if kind != "ppo_clip":
        asked.append(f"loss_type={kind}")
    if asked:
        yield Fault(
            "bypass-without-loss",
            "error",
            f"{CORRECTION}.bypass_mode",
            True,
            f"verl's V1 trainer ignores {' and '.join(asked)} here: loss_mode={loss} runs with the rollout's log-probs "
            "as the old ones, so the clip acts on the mismatch.",
            "False, or a loss that knows bypass mode",
            "Choose estimator=pg_seq_is, pg_seq_tis or pg_seq_mis.",
        )
    else:
        yield Fault(
            "bypass-clips-mismatch",
            "warning",
            f"{CORRECTION}.bypass_mode",
            True,
            f"loss_mode={loss} clips the ratio to the rollout's log-probs, which contains the mismatch: tokens are "
            "clipped for their rounding. verl logs no mismatch metric in this mode.",
            "False, or a loss that knows bypass mode",
            "Set it to False, or choose estimator=pg_seq_is.",
        )


def threshold_misread(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """`0.5_5` is a number to YAML: 0.55. So is `1e-9_3`: 1e-93."""
    for path, correction in _corrections(config):
        level, value = correction.get("rollout_is"), correction.get("rollout_is_threshold")
        if level and isinstance(value, int | float) and not 1 <= value <= MAX_USUAL_THRESHOLD:
            low = value < 1
            yield Fault(
                "threshold-misread",
                "error" if low else "warning",
                f"{path}.rollout_is_threshold",
                value,
                ("it would truncate weights of on-policy tokens (ratio 1)." if low else "it hardly ever acts.")
                + " YAML reads a band such as 0.5_5 as the number 0.55, 1e-9_3 as 1e-93 and 2_10 as 210.",
                f"a number in [1, {MAX_USUAL_THRESHOLD}], or a band whose parts have a decimal point, as 0.5_5.0",
                f"Set {path}.rollout_is_threshold=2.0, or write the band as 0.5_5.0.",
            )
        modes = correction.get("rollout_rs")
        value = correction.get("rollout_rs_threshold")
        if modes and "k1" in modes and isinstance(value, int | float) and not value > 1:
            yield Fault(
                "threshold-misread",
                "error",
                f"{path}.rollout_rs_threshold",
                value,
                "one number is the upper bound of a k1 band whose lower bound is its reciprocal: below 1 the band is "
                "empty and everything is rejected. YAML reads 0.5_5 as the number 0.55.",
                "a number > 1, or a band whose parts have a decimal point, as 0.5_2.0",
                f"Set {path}.rollout_rs_threshold=2.0.",
            )


def k1_bounds_inverted(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """k1 is -log r, compared with [log lower, log upper]: a band keeps r in [1/upper, 1/lower]."""
    for path, correction in _corrections(config):
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
            wanted = f"{1 / high:.4g}_{float(f'{1 / low:.4g}')}"
            yield Fault(
                "k1-bounds-inverted",
                "error",
                f"{path}.rollout_rs_threshold",
                value,
                f"{name} compares -log r with the logarithms of the bounds, so that ratios in [{1 / high:.4g}, "
                f"{1 / low:.4g}] are kept, not [{low:g}, {high:g}].",
                "a band that is the same both ways round, as 0.5_2.0, or the reciprocals of the bounds meant",
                f"To keep [{low:g}, {high:g}] set {path}.rollout_rs_threshold={wanted}.",
            )


def clip_ratio_c_ignored(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The losses of this package have no dual clip; a value set for it does nothing."""
    value = config.actor_rollout_ref.actor.get("clip_ratio_c", VERLS_CLIP_RATIO_C)
    loss = _loss(config)
    if loss in POLICY_LOSSES and value != VERLS_CLIP_RATIO_C:
        yield Fault(
            "clip-ratio-c-ignored",
            "warning",
            "actor_rollout_ref.actor.clip_ratio_c",
            value,
            f"loss_mode={loss} has no dual clip; only verl's vanilla does.",
            f"{VERLS_CLIP_RATIO_C} (verl's default, not read)",
            "Remove the setting, or choose estimator=dapo.",
        )


def _loss(config: DictConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")


def _corrections(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    for path, node in (
        (CORRECTION, config.algorithm.get("rollout_correction")),
        (
            "actor_rollout_ref.actor.policy_loss.rollout_correction",
            config.actor_rollout_ref.actor.policy_loss.get("rollout_correction"),
        ),
    ):
        if node is not None:
            yield path, node


def _band(text: str) -> tuple[float, float] | None:
    parts = text.split("_")
    try:
        low, high = (float(part) for part in parts)
    except ValueError:  # not a band; verl says so itself when it parses it
        return None
    return (low, high) if low > 0 and high > 0 else None


TRAPS = (normalizer_missing, bypass_without_loss, threshold_misread, k1_bounds_inverted, clip_ratio_c_ignored)
