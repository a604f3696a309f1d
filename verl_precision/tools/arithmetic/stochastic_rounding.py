"""Rounds weights to the rollout's dtype at random, so that on average the rollout has the trained weights.

Nearest rounding hides from the rollout every update that stays below half of one unit in the last place. With
stochastic rounding the probability that such an update changes the rollout's weight is the update's share of the unit.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.base.dtypes import torch_dtype
from verl_precision.integration.engine.build import EnginePart
from verl_precision.weight_sync.manifest import Weights

_CHUNK = 1 << 22  # elements rounded at a time: 100 MiB of temporaries, however large the tensor


def round_what_is_sent(engine: Any, module: nn.Module) -> nn.Module:
    """Round weights at random before they are sent to the rollout: a step of an engine's build."""
    dtype = torch_dtype(engine.engine_config.stochastic_rounding_to)
    # The schedule counts the steps that changed the weights, and checkpoints contain this count.
    of_step = lambda weights: rounded_stream(weights, dtype, step=engine.lr_scheduler.last_epoch)  # noqa: E731
    engine.parts.append(EnginePart(sent=of_step))
    return module


def rounded_stream(weights: Weights, dtype: torch.dtype, step: int) -> Weights:
    """Yield the weights, FP32 ones rounded at random; step and name are the seed, so all processes send the same."""
    for name, weight in weights:
        if weight.dtype == torch.float32:
            weight = round_stochastically(weight, dtype, seed_of(step, name))
        yield name, weight


def seed_of(step: int, name: str) -> int:
    """Return the seed for one tensor in one step: the first 63 bits of SHA-256 of "<step> <name>"."""
    return int.from_bytes(hashlib.sha256(f"{step} {name}".encode()).digest()[:8], "big") >> 1


@torch.no_grad()
def round_stochastically(weight: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round each element up or down, to the nearer neighbour with the higher probability.

        round(x) = ⌊x⌋ with probability (⌈x⌉ - x) / (⌈x⌉ - ⌊x⌋), else ⌈x⌉;  E[round(x)] = x

    ⌊x⌋ and ⌈x⌉ are the neighbours of x in the dtype, subnormal numbers among them. Source: Gupta et al., Deep Learning
    with Limited Numerical Precision, 2015, arXiv 1502.02551, section 3.

    A probability is a multiple of 2⁻²⁴; another one (of a tiny number in FP16) counts as the next multiple above. The
    same seed, weight and kind of device give the same bits. A value of the dtype, ±inf and ±0 included, does not
    change, and NaN stays NaN. Beyond the largest finite number there is no neighbour, and torch's rounding is used.
    """
    flat = weight.detach().reshape(-1)
    rounded = torch.empty_like(flat, dtype=dtype)
    generator = torch.Generator(weight.device).manual_seed(seed)
    for x, out in zip(flat.split(_CHUNK), rounded.split(_CHUNK), strict=True):
        nearest = x.to(dtype)
        error = x - nearest.float()  # exact, as are all differences of neighbours
        bits = nearest.view(torch.int16)  # sign and magnitude: one more is the next number away from zero
        outwards = (error < 0) == nearest.signbit()
        other = torch.where(outwards, bits + 1, bits - 1).view(dtype)
        probability = error.abs() / (other.float() - nearest.float()).abs()  # NaN for NaN and ±inf: keeps nearest
        drawn = torch.rand(x.shape, generator=generator, device=x.device)
        out.copy_(torch.where(drawn < probability, other, nearest))
    return rounded.view(weight.shape)
