"""Names of the metrics that the alarm and the report read, in one place.

verl puts `actor/` before the metrics of an actor update (`actor/precision/loss_scale`); `value_of` finds both.
"""

import math
from collections.abc import Mapping

K3_KL = "mismatch/k3_kl"
LOG_PROB_GAP = "mismatch/log_prob_gap_abs_mean"
PROBS_PEARSON = "mismatch/probs_pearson"
PROB_GAP_MIN = "mismatch/probs_diff_min"
PROB_GAP_MAX = "mismatch/probs_diff_max"
FAILED_MEASUREMENTS = "mismatch/failed_measurements"
STALE_FRACTION = "mismatch/stale_fraction"
TURNS_MAX = "mismatch/turns_max"
TOOL_FRACTION = "mismatch/tool_token_fraction"
NONFINITE_TRAINER = "mismatch/nonfinite_trainer_tokens"
NONFINITE_ROLLOUT = "mismatch/nonfinite_rollout_tokens"
NONFINITE_RESPONSES = "nonfinite_responses"
PHANTOM_CLIPPED = "phantom/phantom_clipped_fraction"
WEIGHT_ESS = "is_weight_ess_fraction"
TOKEN_WEIGHT_ESS = "is_weight_token_ess_fraction"
REJECTED_RESPONSES = "rollout_corr/rejected_responses"
KEPT_RESPONSES = "rollout_corr/kept_response_fraction"
KEPT_TOKENS = "rollout_corr/kept_token_fraction"
REJECTED_TOKENS = "rollout_corr/rollout_rs_masked_fraction"  # verl's own; the only count for its bypass_mode loss
# Effective sample sizes as fractions -> their unit.
SAMPLE_SIZES = {WEIGHT_ESS: "responses", KEPT_RESPONSES: "responses", TOKEN_WEIGHT_ESS: "tokens", KEPT_TOKENS: "tokens"}
SELF_GAP = "mismatch/self_gap_abs_mean"
SELF_GAP_RATIO = "mismatch/self_gap_ratio"
NOISE_SHARE = "distillation/noise_share"
DRAFT_ACCEPTANCE = "weight_sync/draft_acceptance"
SILENT = ZERO_ADVANTAGE, ZERO_GRADIENT = "signal/zero_advantage_responses", "zero_gradient_fraction"
LOSS_SCALE = "precision/loss_scale"
SKIPPED_STEPS = "precision/skipped_steps"
ACTIVE_ALARMS = "alarm/active_count"
RESCUE = "alarm/rescue"
REWARD = "critic/score/mean"

ACTOR = "actor/"
# Metrics that are also measured for each version of responses, and for each turn, if there are several.
BY_VERSION = ("mismatch/tokens", K3_KL, LOG_PROB_GAP)


def behind(versions: int, key: str) -> str:
    """Return the name of a metric of `BY_VERSION`, of the responses that are 0 to 3 versions behind; 3: 3 or more."""
    return key.replace("/", f"/behind_{versions}/", 1)


def of_turn(turn: int, key: str) -> str:
    """Return the name of a metric of `BY_VERSION`, of the tokens of the policy's turn 1 to 8; 8: the 8th and later."""
    return key.replace("/", f"/turn_{turn}/", 1)


def of_current_version(metrics: Mapping[str, object], key: str) -> float | None:
    """Return a metric of `BY_VERSION` of the responses that the present weights sampled, without staleness."""
    stale = value_of(metrics, STALE_FRACTION)
    return value_of(metrics, behind(0, key) if stale else key)


def value_of(metrics: Mapping[str, object], key: str) -> float | None:
    """Return a metric of a step, with or without verl's `actor/` before it.

    The value may be NaN or infinite; null is NaN, because verl's file logger writes NaN as null. None: not measured.
    """
    for name in (key, ACTOR + key):
        if name in metrics:
            value = metrics[name]
            return math.nan if value is None else float(value)  # type: ignore[arg-type]
    return None
