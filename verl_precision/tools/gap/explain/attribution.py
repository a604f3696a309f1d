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
    which only δ_i² contributes: parts are shares of the variance.

    Args:
        log_probs: ℓ_0 to ℓ_K, float64 [N] each, log-probs of the same tokens, nats. Tokens with a value that is not
            finite are left out, and counted.
    """
    log_probs_KN = np.stack(log_probs)
    finite_N = np.isfinite(log_probs_KN).all(axis=0)
    log_probs_KN = log_probs_KN[:, finite_N]
    tokens = log_probs_KN.shape[1]
    steps_KN = np.diff(log_probs_KN, axis=0)
    gap_N = log_probs_KN[-1] - log_probs_KN[0]
    small_N = np.abs(gap_N) < _SMALL
    whole_N = _k3(gap_N)
    slope_N = np.where(small_N, gap_N / 2, whole_N / np.where(small_N, 1, gap_N))
    mean = 1 / max(tokens, 1)
    parts = tuple(
        Part(float(nats), float(k3), float(size), float(without))
        for nats, k3, size, without in zip(
            steps_KN @ np.sign(gap_N) * mean,
            steps_KN @ slope_N * mean,
            np.abs(steps_KN).sum(axis=1) * mean,
            _k3(gap_N - steps_KN).sum(axis=1) * mean,
            strict=True,
        )
    )
    return Attribution(parts, float(np.abs(gap_N).sum() * mean), float((gap_N * slope_N).sum() * mean), tokens,
                     int((~finite_N).sum()))  # fmt: skip


def _k3(gap: np.ndarray) -> np.ndarray:
    """Return e^g - 1 - g, to nine digits also of small ones, where the terms cancel."""
    return np.where(np.abs(gap) < _SMALL, gap * gap / 2, np.expm1(gap) - gap)
