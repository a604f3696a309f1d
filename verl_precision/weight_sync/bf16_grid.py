"""Which weights change in BF16 between two weight syncs? They are counted while they are sent. Pure torch.

Weights of a released checkpoint are numbers that BF16 can hold. An update of FP32 weights that is smaller than half of
one unit in the last place of BF16 (2⁻⁹ to 2⁻⁸ of the weight) changes the trainer's policy, but not the rollout's.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CROSSINGS, OFF_GRID = "precision/bf16_crossings_fraction", "precision/bf16_off_grid_fraction"

SAMPLE = 4096  # most elements that are sampled in one tensor


class Bf16Grid:
    """Share of weights whose BF16 value changed since the last sync, and share that BF16 cannot represent.

        f̂ = Σₜ nₜ·cₜ/mₜ / Σₜ nₜ

    Of the nₜ elements of tensor t, mₜ are sampled (`sample`), and cₜ of these count. f̂ estimates the share of all
    weights, with a standard error of √(Σₜ (nₜ/N)²·fₜ(1 - fₜ)/mₜ·(1 - mₜ/nₜ)), N = Σₜ nₜ and fₜ the share in tensor t:
    at most 0.8% for a single tensor, and 0.8%/√K for K tensors of one size (stratified sampling, Cochran, Sampling
    Techniques, 1977, chapter 5). Between syncs 8 KiB of each tensor stay on its device; only `take` waits for it.
    """

    def __init__(self) -> None:
        """Begin without an earlier sync: crossings are counted from the second sync on, also after a resume."""
        self._before: dict[str, Tensor] = {}  # name -> bits of the sample in BF16, at the latest sync
        self._counted: dict[torch.device, Tensor] = {}  # [2] float64: Σ nₜ·cₜ/mₜ of crossings, of elements off the grid
        self._compared = self._seen = 0  # Σ nₜ of the tensors with an earlier sync, and of all tensors

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield a stream of weights (no DTensors, not yet rounded for the rollout) unchanged and count them."""
        for name, weight in weights:
            if weight.is_floating_point() and weight.numel():
                self._count(name, weight.detach())
            yield name, weight

    def take(self) -> dict[str, float]:
        """Return the metrics of the syncs since the last call, and start counting anew.

        Crossings need an earlier sync. A NaN is off the grid, and crosses when its bits change.
        """
        crossings, off_grid = sum((counted.cpu() for counted in self._counted.values()), torch.zeros(2)).tolist()
        found = {CROSSINGS: crossings / self._compared} if self._compared else {}
        if self._seen:
            found[OFF_GRID] = off_grid / self._seen
        self._counted, self._compared, self._seen = {}, 0, 0
        return found

    def _count(self, name: str, weight: Tensor) -> None:
        looked_at = sample(weight)
        rounded = looked_at.to(torch.bfloat16)
        bits, before = rounded.view(torch.int16), self._before.get(name)
        off_grid = (rounded.to(looked_at.dtype) != looked_at).sum()
        crossings = torch.zeros_like(off_grid) if before is None else (bits != before).sum()
        counts = torch.stack([crossings, off_grid]).double() * (weight.numel() / looked_at.numel())
        self._counted[weight.device] = self._counted.get(weight.device, 0) + counts
        self._seen += weight.numel()
        self._compared += 0 if before is None else weight.numel()
        # Copy BF16 weights too: the trainer continues to write to them.
        self._before[name] = bits.clone() if weight.dtype == torch.bfloat16 else bits


def sample(weight: Tensor) -> Tensor:
    """Return every k-th element, at most 4096; k has no common factor with a row, so that all columns have a part."""
    step = -(-weight.numel() // SAMPLE)
    row = weight.shape[-1] if weight.dim() else 1
    while math.gcd(step, row) > 1:
        step += 1
    return weight.reshape(-1)[::step]
