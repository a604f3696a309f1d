"""Every metric again, in plain float64 numpy over whole arrays: the oracle of the tests.

A batch is a list of responses; a response is a dict of 1-D arrays of its valid tokens.
"""

import itertools
import math

import numpy as np

POWERS = ("1", "1e-1", "1e-2", "1e-3", "1e-4", "0")
BINS = {f"prob_{low}_{high}": (float(low), float(high)) for high, low in itertools.pairwise(POWERS)}


def usable(*log_probs):
    return np.logical_and.reduce([np.isfinite(x) & (x <= 0) for x in log_probs])


def bad_counts(*log_probs):
    finite = np.logical_and.reduce([np.isfinite(x) for x in log_probs])
    return (~finite).sum(), (finite & ~usable(*log_probs)).sum()


def ended(response):
    """Whether it was not cut."""
    return bool(np.all(response.get("ended", True)))


def off_by_half_a_bin(quantile):
    """How far from it one may be that is read off the histogram."""
    return abs(quantile) / 31 + 2**-30


def bin_of(mu):
    p = np.exp(mu)
    return {name: (p > low if low else p >= 0) & (p <= high) for name, (low, high) in BINS.items()}


def mean(values):
    return float(np.mean(values)) if len(values) else None


def spread(name, x):
    return {f"{name}_mean": x.mean(), f"{name}_std": x.std(), f"{name}_min": x.min(), f"{name}_max": x.max()}


def mismatch(responses, c=3.0):
    pi, mu, advantage = (np.concatenate([[], *(r[k] for r in responses)]) for k in ("trainer", "rollout", "advantage"))
    keep = usable(pi, mu)
    nonfinite, positive = bad_counts(pi, mu)
    whole = [r for r in responses if len(r["rollout"]) and usable(r["trainer"], r["rollout"]).all()]
    found = {"tokens": keep.sum(), "responses": len(whole), "nonfinite_tokens": nonfinite}
    found["positive_log_probs"] = positive
    pi, mu, advantage = pi[keep], mu[keep], advantage[keep]
    if len(pi):
        g, p, q = pi - mu, np.exp(pi), np.exp(mu)
        capped = np.minimum(g, 600.0)
        found |= {
            **spread("log_prob_gap", g),
            "log_prob_gap_abs_mean": np.abs(g).mean(),
            "equal_fraction": (pi == mu).mean(),
            "k1_kl": (-g).mean(),
            "k3_kl": (np.expm1(capped) - capped).mean(),
            "total_variation": np.abs(np.expm1(capped)).mean() / 2,
            "chi_square": np.expm1(2 * np.minimum(g, 300.0)).mean(),
            "probs_diff_abs_mean": np.abs(p - q).mean(),
            "probs_diff_min": (p - q).min(),
            "probs_diff_max": (p - q).max(),
            "log_prob_gap_mean_positive_advantage": mean(g[advantage > 0]),
            "log_prob_gap_mean_negative_advantage": mean(g[advantage < 0]),
        }
        for name, values in (("trainer", pi), ("rollout", mu)):
            if -values.mean() < math.log(np.finfo(np.float64).max):
                found[f"{name}_perplexity"] = np.exp(-values.mean())
        for name, quantile in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            found[f"log_prob_gap_{name}"] = np.quantile(g, quantile, method="inverted_cdf")
        for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
            found[f"log_prob_gap_abs_{name}"] = np.quantile(np.abs(g), quantile, method="inverted_cdf")
        if min(p.var(), q.var()) > 1e-12:
            found["probs_pearson"] = np.corrcoef(p, q)[0, 1]
        for name, inside in bin_of(mu).items():
            found[f"{name}/token_fraction"] = inside.mean()
            found[f"{name}/log_prob_gap_abs_mean"] = mean(np.abs(g[inside]))
    if whole:
        s = np.array([(r["trainer"] - r["rollout"]).sum() for r in whole])
        length = np.array([len(r["rollout"]) for r in whole], dtype=np.float64)
        weights = np.exp(s - s.max())
        found |= {
            **spread("sequence_log_ratio", s),
            "sequence_ratio_at_most_c": (s <= math.log(c)).mean(),
            "sequence_ratio_within_c": (np.abs(s) <= math.log(c)).mean(),
            "sequence_chi_square": np.expm1(2 * np.minimum(s, 300)).mean(),
            "sequence_ess": weights.sum() ** 2 / (weights**2).sum(),
        }
        found["sequence_ess_fraction"] = found["sequence_ess"] / len(s)
        if len(set(length)) > 1:
            found["sequence_log_ratio_abs_per_1k_tokens"] = np.polyfit(length / 1000, np.abs(s), 1)[0]
        found["final_token_gap_mean"] = mean([(r["trainer"] - r["rollout"])[-1] for r in whole if ended(r)])
    return {f"mismatch/{name}": float(value) for name, value in found.items() if value is not None}


def clipped(log_ratio, advantage, clip):
    """The log-ratio is that of the token, or of its response."""
    beyond = (log_ratio < clip.low) | (log_ratio > clip.dual)
    return (advantage > 0) & (log_ratio > clip.high) | (advantage < 0) & beyond


def log_ratios(responses, above, below, clip):
    """Of all tokens; a response with an unusable token is left out by a loss that clips responses."""
    found = [np.zeros(0)]
    for response in responses:
        keep = usable(*(response[name] for name in ("trainer", "shadow", "rollout")))
        gap = (response[above] - response[below])[keep]
        if clip.sequence:
            gap = np.full(len(gap), gap.mean() if keep.all() and len(gap) else 0.0)
        found.append(gap)
    return np.concatenate(found)


def phantom(responses, clip=None, beta_in_ratio=True):
    names = ("trainer", "shadow", "rollout", "advantage")
    columns = [np.concatenate([[], *(r[k] for r in responses)]) for k in names]
    keep = usable(*columns[:3])
    nonfinite, positive = bad_counts(*columns[:3])
    found = {"tokens": keep.sum(), "nonfinite_tokens": nonfinite, "positive_log_probs": positive}
    trainer, shadow, mu, advantage = (column[keep] for column in columns)
    if len(trainer):
        alpha, beta = shadow - mu, trainer - shadow
        for name, x in (("alpha", alpha), ("beta", beta)):
            found |= {**spread(name, x), f"{name}_abs_mean": np.abs(x).mean()}
        found["beta_mean_positive_advantage"] = mean(beta[advantage > 0])
        found["beta_mean_negative_advantage"] = mean(beta[advantage < 0])
        for name, inside in bin_of(mu).items():
            found[f"{name}/beta_abs_mean"] = mean(np.abs(beta[inside]))
        if clip is not None:
            found |= clipping(responses, advantage, mu, clip, beta_in_ratio)
    return {f"phantom/{name}": float(value) for name, value in found.items() if value is not None}


def clipping(responses, advantage, mu, clip, beta_in_ratio):
    with_beta = clipped(log_ratios(responses, "trainer", "rollout", clip), advantage, clip)
    without = clipped(log_ratios(responses, "shadow", "rollout", clip), advantage, clip)
    ghost, beta = with_beta & ~without, log_ratios(responses, "trainer", "shadow", clip)
    if not beta_in_ratio:
        found = {"clipped_fraction": without.mean(), "avoided_fraction": ghost.mean()}
        return {**found, "final_token_clip_fraction": mean(final_tokens(responses, without))}
    return {
        "final_token_clip_fraction": mean(final_tokens(responses, with_beta)),
        "beta_beyond_clip_fraction": ((beta > clip.high) | (beta < clip.low)).mean(),
        "phantom_clipped_fraction": ghost.mean(),
        "clipped_fraction": with_beta.mean(),
        "missed_fraction": (without & ~with_beta).mean(),
        "phantom_clipped_fraction_positive_advantage": mean(ghost[advantage > 0]),
        "phantom_clipped_fraction_negative_advantage": mean(ghost[advantage < 0]),
        **{f"{name}/phantom_clipped_fraction": mean(ghost[inside]) for name, inside in bin_of(mu).items()},
    }


def final_tokens(responses, values):
    """The values at the last token of each response with A > 0 there that is whole and was not cut."""
    found, begin = [], 0
    for response in responses:
        keep = usable(*(response[name] for name in ("trainer", "shadow", "rollout")))
        begin += keep.sum()
        if len(keep) and keep.all() and ended(response) and response["advantage"][-1] > 0:
            found.append(values[begin - 1])
    return found
