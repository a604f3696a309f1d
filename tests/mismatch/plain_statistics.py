"""Every metric again, in plain float64 numpy over whole arrays: the oracle of the tests.

A batch is a list of responses; a response is a dict of 1-D arrays of its valid tokens.
"""

import math

import numpy as np

BINS = {
    "prob_1e-1_1": (1e-1, 1),
    "prob_1e-2_1e-1": (1e-2, 1e-1),
    "prob_1e-3_1e-2": (1e-3, 1e-2),
    "prob_1e-4_1e-3": (1e-4, 1e-3),
    "prob_0_1e-4": (0, 1e-4),
}
ONE_SIDE = [2.0**e * (1 + k / 16) for e in range(-30, 12) for k in range(16)] + [2.0**12]
EDGES = np.array([-math.inf, *(-x for x in reversed(ONE_SIDE)), *ONE_SIDE, math.inf])
ABS_EDGES = np.array([0.0, *ONE_SIDE, math.inf])


def usable(*log_probs):
    return np.logical_and.reduce([np.isfinite(x) & (x <= 0) for x in log_probs])


def bad_counts(*log_probs):
    finite = np.logical_and.reduce([np.isfinite(x) for x in log_probs])
    return (~finite).sum(), (finite & ~usable(*log_probs)).sum()


def histogram_quantile(values, q, absolute=False):
    """The smallest x with F(x) >= q, F uniform within each bin of the float32-rounded values."""
    rounded = np.float32(values).astype(np.float64)
    above, _ = np.histogram(rounded[rounded >= 0], ABS_EDGES)
    below, _ = np.histogram(-rounded[rounded < 0], ABS_EDGES)
    if absolute:
        edges, counts, low = ABS_EDGES, above + below, 0.0
        high = np.abs(values).max()
    else:
        edges, counts = EDGES, np.concatenate([below[:0:-1], [above[0] + below[0]], above[1:]])
        low, high = values.min(), values.max()
    cumulated, rank = np.cumsum(counts), q * len(values)
    k = next(i for i, c in enumerate(cumulated) if c >= rank)
    left, right = max(edges[k], low), min(edges[k + 1], high)
    return min(max(left + (right - left) * (rank - cumulated[k] + counts[k]) / counts[k], low), high)


def bin_of(mu):
    probability = np.exp(mu)
    return {
        name: (probability > low if low else probability >= 0) & (probability <= high)
        for name, (low, high) in BINS.items()
    }


def mean(values):
    return float(np.mean(values)) if len(values) else None


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
            "log_prob_gap_mean": g.mean(),
            "log_prob_gap_std": g.std(),
            "log_prob_gap_abs_mean": np.abs(g).mean(),
            "log_prob_gap_min": g.min(),
            "log_prob_gap_max": g.max(),
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
            found[f"log_prob_gap_{name}"] = histogram_quantile(g, quantile)
        for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
            found[f"log_prob_gap_abs_{name}"] = histogram_quantile(g, quantile, absolute=True)
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
            "sequence_log_ratio_mean": s.mean(),
            "sequence_log_ratio_std": s.std(),
            "sequence_log_ratio_min": s.min(),
            "sequence_log_ratio_max": s.max(),
            "sequence_ratio_at_most_c": (s <= math.log(c)).mean(),
            "sequence_ratio_within_c": (np.abs(s) <= math.log(c)).mean(),
            "sequence_ess": weights.sum() ** 2 / (weights**2).sum(),
        }
        found["sequence_ess_fraction"] = found["sequence_ess"] / len(s)
        if len(set(length)) > 1:
            slope = np.polyfit(length / 1000, np.abs(s), 1)[0]
            found["sequence_log_ratio_abs_per_1k_tokens"] = slope
    return {f"mismatch/{name}": float(value) for name, value in found.items() if value is not None}


def clipped(log_ratio, advantage, low, high):
    ratio = np.exp(np.minimum(log_ratio, 600))
    return (advantage > 0) & (ratio > 1 + high) | (advantage < 0) & (ratio < 1 - low)


def phantom(responses, low=0.2, high=0.28, against="rollout"):
    names = ("trainer", "shadow", "rollout", "advantage", against)
    columns = [np.concatenate([[], *(r[k] for r in responses)]) for k in names]
    used = [columns[i] for i in (0, 1, 2, 4)]
    keep = usable(*used)
    nonfinite, positive = bad_counts(*used)
    found = {"tokens": keep.sum(), "nonfinite_tokens": nonfinite, "positive_log_probs": positive}
    trainer, shadow, mu, advantage, base = (column[keep] for column in columns)
    if len(trainer):
        alpha, beta = shadow - mu, trainer - shadow
        with_beta = clipped(trainer - base, advantage, low, high)
        without = clipped(shadow - base, advantage, low, high)
        ghost = with_beta & ~without
        for name, x in (("alpha", alpha), ("beta", beta)):
            found |= {f"{name}_mean": x.mean(), f"{name}_abs_mean": np.abs(x).mean(), f"{name}_std": x.std()}
            found |= {f"{name}_min": x.min(), f"{name}_max": x.max()}
        found |= {
            "beta_beyond_clip_fraction": ((beta > np.log(1 + high)) | (beta < np.log(1 - low))).mean(),
            "fraction": ghost.mean(),
            "clip_fraction": with_beta.mean(),
            "missed_fraction": (without & ~with_beta).mean(),
            "fraction_positive_advantage": mean(ghost[advantage > 0]),
            "fraction_negative_advantage": mean(ghost[advantage < 0]),
            "beta_mean_positive_advantage": mean(beta[advantage > 0]),
            "beta_mean_negative_advantage": mean(beta[advantage < 0]),
        }
        for name, inside in bin_of(mu).items():
            found[f"{name}/fraction"] = mean(ghost[inside])
            found[f"{name}/beta_abs_mean"] = mean(np.abs(beta[inside]))
    return {f"phantom/{name}": float(value) for name, value in found.items() if value is not None}
