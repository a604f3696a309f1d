"""Does a policy loss depend on the split of a batch? A trial compares a whole batch with its parts.

A loss is invariant if the summed gradient of its micro-batches equals the gradient of the whole batch, for every cut,
order, padding width and number of ranks. `assert_conforms` makes the trial a test of your own loss. One small batch is
enough: responses of several lengths, one of a single token, some tokens masked within a response, advantages of both
signs and zero, ratios on both sides of every usual clip range.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from verl_precision.base.errors import CheckFailedError
from verl_precision.losses.registry import LossInputs

CUTS = (2, 4, 8)
DEPENDS = 1e-3  # a relative difference of two gradients above this is no rounding
DRAWS = 16  # calls of a loss that uses random numbers; the means of its gradients are compared
CERTAIN = 3.0  # a difference above this many standard errors of such a mean is not chance
LENGTHS = (16, 4, 9, 12, 6, 14, 1, 10)  # tokens of the responses
WIDER = 5  # columns of padding that are added
# The values of masked tokens in one of the trials.
OTHERS = {"old_log_probs": -0.4, "trainer_log_probs": -1.3, "advantages": 0.7, "rollout_is_weights": 1.7}


@dataclass(frozen=True)
class Counts:
    """The counts of a whole mini-batch, which a host passes to each part."""

    num_responses: int
    num_tokens: int
    dp_size: int = 1


@dataclass(frozen=True)
class Trial:
    """The result of a trial; differences are |found - whole| / |whole| of the gradient by token."""

    cuts: dict[int, float]  # by the number of micro-batches
    ranks: float  # two ranks, whose gradients are averaged
    padding: float  # more columns of padding
    masked: float  # masked tokens hold other numbers
    nonfinite: str  # the first call whose value or gradient was NaN or inf; empty if there is none
    random: bool  # equal calls differ: the loss uses random numbers, or keeps a state
    order: float = 0.0  # the responses in another order


class UnusableLossError(Exception):
    """The value that a loss returned cannot be used for training."""


Loss = Callable[[LossInputs, Counts], Tensor]
"""A loss as its host calls it: a scalar of a part of a mini-batch, to be summed over parts and averaged over ranks."""


def trial_batch(dtype: torch.dtype = torch.float64, weighted: bool = False) -> LossInputs:
    """Return the batch of a trial, always the same batch, with a bool mask."""
    draw = torch.Generator().manual_seed(0)
    shape = len(LENGTHS), max(LENGTHS)
    log_probs = -2.5 * torch.rand(shape, generator=draw, dtype=torch.float64).square() - 0.05
    mean = torch.tensor([0.1, -0.45, 0.3, -0.25, 0.5, 0.02, 1.2, -0.15], dtype=torch.float64)
    noise = 0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)
    old = (log_probs - mean[:, None] - noise).clamp(max=0)
    old[1, 2], log_probs[1, 2] = -2.2, -0.2  # a ratio beyond a dual clip, where the advantage is negative
    old[0, 0] = log_probs[0, 0] = 0  # a token of probability 1
    advantages = torch.tensor([1.4, -1.6, 0.7, -0.4, 1.1, -0.9, 1.9, 0.0], dtype=torch.float64)[:, None].expand(shape)
    weights = 0.5 + torch.rand(shape, generator=draw, dtype=torch.float64) if weighted else None
    if weights is not None:
        weights[1] *= 0.5  # π has left this response by more than half a nat
    inside = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    batch = LossInputs(log_probs, old, advantages, inside, weights)
    batch = batch.of_all(lambda tensor: torch.where(inside, tensor, 0).to(dtype))
    mask = inside.clone()
    mask[3, 4:6] = mask[5, 9] = False  # a tool's answer
    return batch._replace(response_mask=mask)


def try_loss(loss: Loss, batch: LossInputs) -> Trial:
    """Call a loss on a batch, such as `trial_batch()`, whole and in parts, and compare the gradients.

    Errors of the loss are passed on. `UnusableLossError` is raised if the loss returns no scalar with a gradient.
    """
    mask, tensors = batch.response_mask, batch.tensors()
    other = batch._replace(**{name: torch.where(mask, tensors[name], OTHERS[name]) for name in OTHERS & tensors.keys()})
    whole = partial(_gradient, loss, batch)
    ways: dict[str, Callable[[int], Tensor]]
    ways = {"the whole batch": whole, **{f"{cut} micro-batches": partial(whole, cut=cut) for cut in CUTS}}
    ways |= {"two ranks": partial(whole, cut=2, ranks=2), "more padding": partial(whole, wider=WIDER)}
    turned = partial(_gradient, loss, batch.of_all(lambda tensor: tensor.flip(0)))
    ways["another order"] = lambda seed: turned(seed).flip(0)
    ways["different numbers in masked tokens"] = partial(_gradient, loss, other)
    with torch.random.fork_rng(devices=[]):
        first = [whole(seed) for seed in range(4)]
        random = any(not torch.equal(each, first[0]) for each in first if bool(each.isfinite().all()))
        draws = range(DRAWS if random else 1)
        found = {name: torch.stack([way(seed) for seed in draws]) for name, way in ways.items()}
    nonfinite = next((name for name, gradients in found.items() if not bool(gradients.isfinite().all())), "")
    expected, *others = found.values()
    if not nonfinite and not bool(expected.any()):
        raise UnusableLossError("its gradient is 0 everywhere")
    *cuts, ranks, padding, order, masked = (_difference(gradients, expected) for gradients in others)
    return Trial(dict(zip(CUTS, cuts, strict=True)), ranks, padding, masked, nonfinite, random, order)


def assert_conforms(loss: Loss, *, stops_gradients: bool = False, weighted: bool = False) -> Trial:
    """Assert in a test that a loss is finite, does not depend on the batch's split, and has its value's gradient.

    Args:
        loss: Called with `LossInputs` and `Counts`; `check.loss_trial.as_verl_calls` makes it from a loss of verl.
        stops_gradients: Whether some factors are constants in the gradient; then the value's differences are not tried.
        weighted: Whether the batch has `rollout_is_weights`.

    Returns:
        The trial. If its `random` is true, gradients are means over draws, and the value's differences are not tried.
        NaN in masked tokens is not tried: verl's own `vanilla` would fail.

    Raises:
        CheckFailedError: An AssertionError that names every difference above `DEPENDS`.
        UnusableLossError: If the loss returns no scalar with a gradient.
    """
    batch = trial_batch(weighted=weighted)
    trial, mask = try_loss(loss, batch), batch.response_mask
    found = {f"{cut} micro-batches": size for cut, size in trial.cuts.items()}
    found |= {"two ranks": trial.ranks, "more padding": trial.padding, "another order": trial.order}
    found["different numbers in masked tokens"] = trial.masked
    broken = batch._replace(old_log_probs=torch.where(mask, batch.old_log_probs, -math.inf))
    with torch.random.fork_rng(devices=[]):
        gradient, of_broken = (_gradient(loss, each, seed=0) for each in (batch, broken))
        found["old log-probs of -inf in masked tokens"] = _difference(of_broken[mask][None], gradient[mask][None])
        if not stops_gradients and not trial.random:
            found["differences of the value"] = _beside_differences(loss, batch, gradient)
    failed = [f"{name} {size:.2g}" for name, size in found.items() if not size <= DEPENDS]
    failed += [f"NaN or inf with {trial.nonfinite}"] if trial.nonfinite else []
    if failed:
        problem = f"the gradient changes by these shares of its size: {', '.join(failed)}"
        raise CheckFailedError(problem, allowed=f"at most {DEPENDS:g}, and finite numbers")
    return trial


def _beside_differences(loss: Loss, batch: LossInputs, gradient: Tensor, step: float = 1e-6) -> float:
    """Return the relative difference of the gradient and the value's central differences, along random directions."""
    mask, counts = batch.response_mask, Counts(len(batch.response_mask), int(batch.response_mask.sum()))
    draw, along, measured = torch.Generator().manual_seed(1), [], []
    for _ in range(8):
        direction = torch.where(mask, torch.randn(mask.shape, generator=draw, dtype=gradient.dtype), 0)
        moved = (batch.trainer_log_probs + side * step * direction for side in (1, -1))
        up, down = (loss(batch._replace(trainer_log_probs=each.requires_grad_()), counts).item() for each in moved)
        measured.append((up - down) / (2 * step))
        along.append(float((gradient * direction).sum()))
    return math.dist(along, measured) / (math.hypot(*measured) or math.nan)


def gradients_differ(loss: Loss, one: LossInputs, other: LossInputs) -> bool:
    """Return whether a loss differs on two batches, with the same random numbers."""
    with torch.random.fork_rng(devices=[]):
        first, second = (_gradient(loss, batch, seed=0) for batch in (one, other))
    return _difference(second[None], first[None]) > DEPENDS


def _gradient(loss: Loss, batch: LossInputs, seed: int, cut: int = 1, ranks: int = 1, wider: int = 0) -> Tensor:
    """Return the gradient of each token's log-prob, from `cut` parts, each padded to its own longest response."""
    torch.manual_seed(seed)
    mask, leaf = batch.response_mask, batch.trainer_log_probs.clone().requires_grad_()
    counts = Counts(len(mask), int(mask.sum()), ranks)
    for rows in torch.arange(len(mask)).chunk(cut):
        value = loss(batch._replace(trainer_log_probs=leaf).of_all(partial(_part, rows, wider, mask)), counts)
        if value.numel() != 1:
            raise UnusableLossError(f"it returns a tensor of shape {tuple(value.shape)}")
        if not value.requires_grad:
            raise UnusableLossError("it returns a tensor without a gradient")
        # a value that is not finite may have a gradient of 0
        (value.sum() if bool(value.isfinite()) else value.sum() * math.nan).backward()
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad / ranks


def _part(rows: Tensor, wider: int, mask: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of some rows, as wide as their longest response plus `wider` columns."""
    width = int(mask[rows].any(dim=0).nonzero().max()) + 1
    return torch.nn.functional.pad(tensor[rows, :width], (0, wider))


def _difference(found: Tensor, whole: Tensor) -> float:
    """Return the relative difference of two means over draws; 0 if it may be chance, in norm and in direction."""
    apart, mean = (found - whole).flatten(1), whole.mean(dim=0).flatten()
    size, draws = float(apart.mean(dim=0).norm()), len(apart)
    if draws > 1:
        along = apart @ mean  # along the whole gradient, the chance of single tokens averages out
        chance, chance_along = (float(each.var(dim=0).sum().sqrt()) / math.sqrt(draws) for each in (apart, along))
        if size <= CERTAIN * chance and float(along.mean().abs()) <= CERTAIN * chance_along:
            return 0.0
    return size / (float(mean.norm()) or math.nan)
