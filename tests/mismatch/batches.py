"""Random batches as lists of responses, and their padded and jagged tensors; comparison with a tolerance."""

import contextlib
import functools
import math
import re

import numpy as np
import plain_statistics
import pytest
import torch

from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch import fused, packing
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.statistics import MismatchStatistics

NAMES = ("trainer", "shadow", "rollout", "advantage")
BY_TOKEN = ClipRange(False, math.log(0.8), math.log(1.28))
BY_SEQUENCE = ClipRange(True, -0.01, 0.02)
DUAL = ClipRange(False, -math.inf, math.log(1.28), dual=math.log(1.5))


def _phantom(**options):
    names = ("trainer", "shadow", "rollout")
    return PhantomStatistics, names, functools.partial(plain_statistics.phantom, **options), options


# What is measured -> its name in the metrics, the arguments of `measure` beside the mask, the oracle, more arguments.
KINDS = {
    "mismatch": (MismatchStatistics, ("trainer", "rollout"), plain_statistics.mismatch, {}),
    "phantom": _phantom(clip=BY_TOKEN),
    "phantom, no clip": _phantom(clip=None),
    "phantom, by sequence": _phantom(clip=BY_SEQUENCE),
    "phantom, dual clip without lower bound": _phantom(clip=DUAL),
    "phantom, ratio from the shadow": _phantom(clip=BY_TOKEN, beta_in_ratio=False),
}


def random_responses(rows, longest, seed, gap=1e-2, shortest=0):
    """Log-probs are float32 numbers, as the engines give them; lengths are uniform."""
    rng = np.random.default_rng(seed)
    responses = []
    for length in rng.integers(shortest, longest + 1, rows):
        mu = -rng.exponential(2.5, length)
        engines = {name: np.minimum(mu + gap * rng.standard_normal(length), 0) for name in ("trainer", "shadow")}
        response = {"rollout": mu, **engines}
        response = {name: np.float32(values).astype(np.float64) for name, values in response.items()}
        response["advantage"] = np.full(length, rng.choice([-1.5, 0.0, 0.5]))
        responses.append({**response, "ended": np.full(length, rng.random() < 0.7)})
    return responses


def padded(responses, junk=0.0, width=None, dtype=torch.float32):
    """Return name -> [B, T], and the mask as int64; `junk` fills what is masked."""
    lengths = [len(response["rollout"]) for response in responses]
    width = max([0, *lengths]) if width is None else width
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(-1)
    rest = torch.full(mask.shape, junk, dtype=dtype)
    values = {name: np.concatenate([[], *(response[name] for response in responses)]) for name in NAMES}
    return {name: rest.masked_scatter(mask, torch.tensor(values[name]).to(dtype)) for name in NAMES}, mask.long()


def jagged(responses):
    rows = {name: [torch.tensor(r[name], dtype=torch.float32) for r in responses] for name in NAMES}
    return {name: torch.nested.nested_tensor(rows[name], layout=torch.jagged) for name in NAMES}, None


def measured(responses, kind="mismatch", layout=padded, mask=None, **options):
    """Measure a batch; `options` are those of the layout."""
    statistics, names, _, more = KINDS[kind]
    tensors, valid = layout(responses, **options)
    arguments = [*(tensors[name] for name in names), valid if mask is None else mask, tensors["advantage"]]
    ended = torch.tensor([plain_statistics.ended(response) for response in responses], dtype=torch.bool)
    return statistics.measure(*arguments, ended=ended, **more)


@contextlib.contextmanager
def in_pieces(tokens: int):
    """Inside, batches are measured so many tokens at a time, by the kernel and by torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CPU_CHUNK_TOKENS", tokens)
        patch.setattr(fused, "PIECE_TOKENS", tokens)
        yield


def assert_close(found, expected, tolerance=1e-6):
    """1e-6 of each metric's own size; where it is a difference of sums, of the size of what is summed (`scale`)."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert math.isfinite(found[name]), name
        is_quantile = re.search(r"gap_(abs_)?p\d", name)
        most = plain_statistics.off_by_half_a_bin(value) if is_quantile else tolerance * scale(name, expected)
        assert abs(found[name] - value) <= most, (name, found[name], value)


def scale(name, expected):
    """Means of signed numbers and spreads: the root mean square. A correlation: 1. A slope: that of the largest |s|."""
    for stem in ("log_prob_gap", "sequence_log_ratio", "alpha", "beta"):
        prefix = name.partition("/")[0] + "/"
        if f"{prefix}{stem}_mean" in expected and (f"/{stem}_mean" in name or f"/{stem}_std" in name or "k1" in name):
            return math.hypot(expected[f"{prefix}{stem}_mean"], expected[f"{prefix}{stem}_std"]) + 1e-300
    if name.endswith("per_1k_tokens"):
        s = max(abs(expected[f"mismatch/sequence_log_ratio_{end}"]) for end in ("min", "max"))
        return max(abs(expected[name]), 1000 * s)
    if name == "mismatch/final_token_gap_mean":
        return scale("mismatch/log_prob_gap_mean", expected)
    return 1.0 if name.endswith("pearson") else abs(expected[name]) + 1e-300
