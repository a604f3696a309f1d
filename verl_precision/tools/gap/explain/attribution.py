"""How a gap is shared among the steps of a path, so that the parts add up to the whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SMALL = 1e-6  # below this gap k3(g)/g is g/2 to nine digits


@dataclass(frozen=True)
class Part:
    """What one step of the path does."""

    nats: float  # its part of the mean |g|, nats. Negative where it undoes what others do
    k3: float  # its part of the k3
    size: float  # mean |δ| of its own, nats: its size, whatever the others do
    without: float  # the k3 that would be left without it
    equal: float  # the share of the tokens that it leaves as they are, to the last bit


@dataclass(frozen=True)
class Attribution:
    """A gap and its parts."""

    parts: tuple[Part, ...]
    nats: float  # mean |g|
    k3: float  # mean of e^g - 1 - g: KL(μ‖π) a token
    tokens: int
    left_out: int  # tokens without a finite log-prob in some variant

    def share(self, part: Part) -> float:
        """Return a part's share of the k3; 0 where there is no gap."""
        return part.k3 / self.k3 if self.k3 else 0.0


def attribute(log_probs: Sequence[np.ndarray]) -> Attribution:
    """Share the gap g = ℓ_K - ℓ_0 of each token among the steps δ_i = ℓ_i - ℓ_{i-1}, whose sum it is.

    A step's part of |g| is δ_i sign(g), and of k3(g) = e^g - 1 - g it is δ_i k3(g)/g. Both sum to the whole token by
    token, and so do their means. Where steps are small and independent, k3(g)/g ≈ g/2 makes the part E[δ_i g]/2, to
    which only δ_i² contributes: parts are shares of the variance. The log-probs ℓ_0 to ℓ_K, float64 [N] each, are in
    nats; tokens with a value that is not finite are left out, and counted.
    """
    log_probs_KN = np.stack(log_probs)
    finite_N = np.isfinite(log_probs_KN).all(axis=0)
    log_probs_KN = log_probs_KN[:, finite_N]
    steps_KN = np.diff(log_probs_KN, axis=0)
    gap_N = log_probs_KN[-1] - log_probs_KN[0]
    small_N = np.abs(gap_N) < _SMALL
    slope_N = np.where(small_N, gap_N / 2, _k3(gap_N) / np.where(small_N, 1, gap_N))
    nats_K, k3_K = steps_KN @ np.sign(gap_N), steps_KN @ slope_N
    sizes_K, without_K = np.abs(steps_KN).sum(axis=1), _k3(gap_N - steps_KN).sum(axis=1)
    mean, equal_K = 1 / max(gap_N.size, 1), (steps_KN == 0).sum(axis=1)
    columns_K = np.stack([nats_K, k3_K, sizes_K, without_K, equal_K], axis=1)
    parts = tuple(Part(*part) for part in (columns_K * mean).tolist())
    nats, k3 = (float(sums_N.sum() * mean) for sums_N in (np.abs(gap_N), gap_N * slope_N))
    return Attribution(parts, nats, k3, gap_N.size, int((~finite_N).sum()))


def _k3(gap: np.ndarray) -> np.ndarray:
    """Return e^g - 1 - g, to nine digits also of small ones, where the terms cancel."""
    return np.where(np.abs(gap) < _SMALL, gap * gap / 2, np.expm1(gap) - gap)
