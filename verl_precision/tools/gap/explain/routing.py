"""The effect of other choices of experts: in a mixture of experts a cause of its own (docs/explain.md has the formula).

H(R) are the log-probs that the trainer's engine gives in FP32 when it computes with choices R. A step that changes the
choices from R to R' has H(R') - H(R) of them, which the step `routing` gets; only a step that is a fault keeps its own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from verl_precision.base.mergeable import Mean
from verl_precision.engine.router_replay import equal_choices
from verl_precision.tools.engines.engine import Request
from verl_precision.tools.gap.explain.variants import REPLAYED, ROLLOUT, Variant
from verl_precision.tools.jobs.journal import Key
from verl_precision.tools.jobs.store import Series, Store


def series_of(variant: Variant) -> tuple[str, str | None]:
    """Return a variant's series in the store."""
    return (variant.name, None) if variant.draws else (ROLLOUT, variant.name)


class Replay(Series):
    """Scores of the responses for which a variant chose other experts than the trainer's engine in FP32."""

    in_flight = 1

    def __init__(self, store: Store, variant: Variant, engine: Variant) -> None:
        """Find what is missing; both variants are complete."""
        self._variant = variant
        keys = [key for key in store.keys if _equal(store, variant, engine, key).value() < 1]
        what = f"responses scored: with the experts of {variant.name}"
        super().__init__(store, ROLLOUT, f"{REPLAYED} {variant.name}", what, keys)

    def _request(self, problem: str, response: int) -> Request:
        experts = _experts(self._store, self._variant, (problem, response))
        return replace(super()._request(problem, response), routed_experts=experts)


@dataclass(frozen=True)
class Routing:
    """What other choices do."""

    log_probs: Mapping[str, np.ndarray]  # variant -> H of its choices, all tokens, nats
    changed: float  # share of the choices that differ between rollout and trainer, over all layers and tokens


def read_routing(store: Store, chain: Sequence[Variant], others: Sequence[Variant], engine: Variant) -> Routing:
    """Return what was scored of the path and of others; the store has the series of `Replay`."""

    def replayed(variant: Variant, key: Key) -> np.ndarray:
        scored = store.positions[ROLLOUT, f"{REPLAYED} {variant.name}"]
        position = scored[key] if key in scored else store.positions[ROLLOUT, engine.name][key]
        return np.array(store.journal.read(position)["log_probs"], np.float32).astype(np.float64)

    variants = (*chain, *others)
    found = {one.name: np.concatenate([replayed(one, key) for key in store.keys]) for one in variants}
    equal = reduce(Mean.merge, (_equal(store, chain[0], chain[-1], key) for key in store.keys))
    return Routing(found, 1 - equal.value())


def with_routing(
    chain: Sequence[Variant], log_probs: Mapping[str, np.ndarray], routing: Routing, kept: Collection[str]
) -> tuple[list[Variant], list[np.ndarray]]:
    """Take what other choices do out of the steps, and return path and log-probs with one step more, which has it.

    Steps of the causes `kept` keep it: other weights choose other experts, and that is not rounding.
    """
    moved = np.zeros_like(log_probs[chain[0].name])
    found = [log_probs[chain[0].name]]
    for before, after in pairwise(chain):
        if after.cause not in kept:
            moved = moved + routing.log_probs[after.name] - routing.log_probs[before.name]
        found.append(log_probs[after.name] - moved)
    step = replace(chain[-1], name="routed", cause="routing", words="with the experts that it chooses itself")
    return [*chain, step], [*found, log_probs[chain[-1].name]]


def _equal(store: Store, one: Variant, other: Variant, key: Key) -> Mean:
    """Return the share of the choices for one response that two variants have in common, over all layers."""
    ours, theirs = (torch.from_numpy(_experts(store, each, key)).flatten(0, 1) for each in (one, other))
    return equal_choices(ours, theirs, torch.ones(len(ours), dtype=torch.bool))


def _experts(store: Store, variant: Variant, key: Key) -> Any:
    """Return a variant's choices for the rollout's tokens, 0 where it drew others: [tokens - 1, layers, top_k]."""
    found = store.routed_experts(*series_of(variant), key)
    if found is None:
        raise RuntimeError(f"variant {variant.name} did not say which experts it chose")
    drawn = store.journal.read(store.positions[ROLLOUT, None][key])["token_ids"]
    length = len(store.prompt_ids[int(key[0])]) + len(drawn) - 1
    return np.pad(found[:length], ((0, max(0, length - len(found))), (0, 0), (0, 0)))
