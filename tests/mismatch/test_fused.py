"""The kernel gives what torch gives, whatever it is handed; where there is none, torch measures and the log says so."""

import functools
import math

import numpy as np
import pytest
import torch
from batches import in_pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.base.mergeable import Count
from verl_precision.mismatch import fused
from verl_precision.mismatch.statistics import MismatchStatistics

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GAPS = (0.0, 1e-9, 1e-4, 1e-2, 1.0, 50.0, 400.0, 1000.0)
BAD = (math.nan, math.inf, -math.inf, 0.25, -1000.0, -5000.0, 0.0, -0.0)
LAYOUTS = (
    lambda x: x,
    lambda x: torch.cat([x[:, :0].new_zeros(len(x), 3), x, x], dim=1)[:, 3 : 3 + x.shape[1]],  # part of a wider one
    lambda x: x.t().contiguous().t(),
    lambda x: x[:1].expand_as(x) if len(x) else x,
    lambda x: x[:, :1].expand_as(x) if x.shape[1] else x,
)
jagged = functools.partial(torch.nested.nested_tensor, layout=torch.jagged)


def by(way, *arguments):
    """Measure with the kernel, or with torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "SMALLEST_BATCH", 0 if way == "kernel" else math.inf)
        assert (fused.kernel_for(torch.zeros(1)) is not None) == (way == "kernel")
        return MismatchStatistics.measure(*arguments)


def assert_same(found, expected):
    """Counts are equal; sums agree within float64 rounding of what is summed."""
    assert found.statistics.keys() == expected.statistics.keys()
    for name, statistic in expected.statistics.items():
        for part, value in vars(statistic).items():
            other = getattr(found.statistics[name], part)
            if not isinstance(value, torch.Tensor):
                assert other == value
            elif part in ("number", "tokens", "counts") or isinstance(statistic, Count):
                assert torch.equal(other, value), (name, part)
            else:
                assert (other.dtype, other.shape) == (value.dtype, value.shape)
                size = torch.maximum(value.abs(), torch.tensor(size_of_terms(name, expected.statistics)))
                assert bool(((other - value).abs() <= 1e-12 * size).all()), (name, part, other, value)


def size_of_terms(name, statistics):
    """Return the sum of absolute values where signed numbers are summed, in torch's way or in both; else 0."""
    if "log_prob_gap_abs_mean" not in statistics:
        return 0.0
    if name.startswith("probs"):
        return statistics["probs_diff_abs_mean"].total.item()
    if name == "chi_square":
        return 4 * statistics["total_variation"].total.item()
    if name == "trainer_perplexity":  # log π = log μ + g
        return statistics["rollout_perplexity"].total.item()
    if name in ("k1_kl", "k3_kl") or name.startswith(("log_prob_gap", "sequence_log_ratio")):
        return statistics["log_prob_gap_abs_mean"].total.sum().item()
    if name == "sequence_ess":  # an error in s is a relative one in e^s
        return statistics["responses"].total.item() * statistics["log_prob_gap_abs_mean"].total.sum().item()
    if name == "sequence_chi_square":  # likewise, in e^2s
        return 2 * statistics[name].total.abs().item() * statistics["log_prob_gap_abs_mean"].total.sum().item()
    return 0.0


@st.composite
def batches(draw):
    """Arguments of `measure`: any type, layout, mask and advantages; some tokens are extreme or unusable."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, longest = draw(st.integers(0, 6)), draw(st.sampled_from([0, 1, 5, 40, 1023, 1024, 1500, 2500]))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(3)]
    mu = -rng.exponential(draw(st.sampled_from([1e-3, 2.5, 100.0])), (rows, longest))
    pi = np.minimum(mu + draw(st.sampled_from(GAPS)) * rng.standard_normal(mu.shape), 0)
    for values in (mu, pi):
        if draw(st.booleans()):
            where = rng.random(mu.shape) < draw(st.sampled_from([1e-3, 0.2]))
            values[where] = rng.choice(BAD, where.sum())
    advantages = rng.choice([-1.5, 0.0, 1e-30, 2.0, math.nan], (rows, 1)) * np.ones_like(mu)
    kind = draw(st.sampled_from(["none", "one a response", "one a token"]))
    if kind == "one a token":
        advantages = rng.permuted(advantages, axis=0)
    lengths = rng.integers(0, longest + 1, rows)
    tensors = [torch.tensor(values).to(dtype) for values, dtype in zip((pi, mu, advantages), dtypes, strict=True)]
    if draw(st.booleans()) and rows:
        mask = None
        if draw(st.booleans()):
            mask = jagged([torch.tensor(rng.random(n) < 0.8) for n in lengths])
        pi, mu, advantages = (jagged([row[:n] for row, n in zip(x, lengths, strict=True)]) for x in tensors)
    else:
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        if draw(st.booleans()):
            mask &= torch.tensor(rng.random(mask.shape) < 0.7)
        mask = mask.to(draw(st.sampled_from([torch.int64, torch.bool, torch.float32, torch.int32]))) * 2
        pi, mu, advantages, mask = (draw(st.sampled_from(LAYOUTS))(tensor) for tensor in (*tensors, mask))
    if kind == "none":
        advantages = None
    elif kind == "one a response":
        advantages = tensors[2][:, 0] if longest else torch.zeros(rows)
    ended = draw(st.sampled_from([None, torch.tensor(rng.random(rows) < 0.5)]))
    return draw(st.sampled_from([1, 1000, 4000, 1 << 19])), (pi, mu, mask, advantages, ended)


@settings(max_examples=200)
@given(batches())
def test_equals_torch(batch):
    tokens, arguments = batch
    with in_pieces(tokens):
        assert_same(by("kernel", *arguments), by("torch", *arguments))


def test_threads_change_nothing():
    generator = torch.Generator().manual_seed(0)
    mu = -torch.rand(40, 9000, generator=generator)
    pi = mu * (1 + 1e-3 * torch.rand(mu.shape, generator=generator))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(by("kernel", pi, mu, torch.ones_like(mu)).metrics())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_which_way_a_batch_goes():
    large = torch.zeros(2, fused.SMALLEST_BATCH // 2)
    assert fused.kernel_for(large) and not fused.kernel_for(large[:1]) and not fused.kernel_for(large.to("meta"))


WITHOUT_NUMBA = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numba":
            raise {error}

sys.meta_path.insert(0, Absent())
from verl_precision.mismatch import fused
from verl_precision.mismatch.statistics import MismatchStatistics

one = torch.full((4, 8), -1.0)
MismatchStatistics.measure(one, one, one)
print("nothing has asked for numba before it is needed")
large = torch.full((8, fused.SMALLEST_BATCH // 8), -1.0)
for _ in range(2):
    assert MismatchStatistics.measure(large + 0.5, large, large).metrics()["mismatch/log_prob_gap_mean"] == 0.5
"""


@pytest.mark.parametrize("error", [
    ModuleNotFoundError("No module named 'numba'"),
    RuntimeError("no locator available"),  # numba's, where no folder can be written for what it compiles
], ids=["not installed", "read-only"])  # fmt: skip
def test_without_the_kernel_torch_measures_and_the_log_says_so_once(run_python, error):
    done = run_python(WITHOUT_NUMBA.format(error=repr(error)))
    assert done.returncode == 0 and done.stdout.startswith("nothing"), done.stderr
    assert done.stdout.count("measured with torch") == 1 and str(error) in done.stdout
