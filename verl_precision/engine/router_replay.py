"""Router replay: a mixture of experts computes with the experts that another engine chose.

Two engines round the router's scores differently, and where two experts are nearly tied they choose different ones.
Then other weights compute the token, and a higher precision elsewhere does not help. Replay takes the choice of the
rollout (R3 of https://arxiv.org/abs/2510.11370), or of the trainer's own earlier forward pass (R2).
The weights of the experts are the trainer's own probabilities of the chosen experts; gradients flow through them.

transformers' routers choose by one `torch.topk` over all experts. While a router runs, this module replaces the result
of that call, also in the second forward of gradient checkpointing. Nothing else in the model changes.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.mergeable import Mean, Statistic

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe")
SETTING = "router_replay.mode"
AGREEMENT, CHANGED = "mismatch/routing_agreement", "mismatch/routing_changed_fraction"


class Choice(NamedTuple):
    """The experts of one router in one forward; integer [tokens, top_k] each."""

    own: Tensor  # the router's own choice
    used: Tensor  # the choice that the forward used


class ReplayedRouters:
    """The routers of a transformers model, not sharded yet, whose choices are replayed, recorded and compared."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        family = config.model_type
        found = {name: chooser for name, module in model.named_modules() if (chooser := _chooser(module))}
        if family not in FAMILIES or not found:
            raise ConfigurationError(
                f"a model of type {family!r} {'has no router' if not found else 'has a router that was not tested'}",
                setting=SETTING, allowed=f"disabled, or a mixture of experts of type {', '.join(FAMILIES)}",
                remedy="Leave out the preset router_replay.",
            )  # fmt: skip
        self._replayed: Tensor | None = None
        self._known: Tensor | None = None
        self._seen: dict[int, Choice] | None = None
        self._layers: int = config.num_hidden_layers
        for name, (module, method, experts, top_k) in found.items():
            layer = int(re.findall(r"(?:^|\.)layers\.(\d+)\.", f"{name}.")[-1])
            route = functools.partial(self._route, getattr(module, method), layer, experts, top_k)
            setattr(module, method, route)

    def replay(self, experts_NLk: Tensor | None, known_N: Tensor | None = None) -> None:
        """Give the routers these choices from now on; where `known_N` is False, a router's own choice is used."""
        self._replayed, self._known = experts_NLk, known_N

    @contextlib.contextmanager
    def watched(self) -> Iterator[dict[int, Choice]]:
        """Yield layer -> choice of its router, which a forward inside the block fills."""
        self._seen = {}
        try:
            yield self._seen
        finally:
            self._seen = None

    def stacked(self, seen: Mapping[int, Choice]) -> Tensor:
        """Return the routers' own choices as one tensor, [tokens, layers, top_k]; 0 in a layer without experts."""
        own = {layer: choice.own for layer, choice in seen.items()}
        nothing = torch.zeros_like(next(iter(own.values())))
        return torch.stack([own.get(layer, nothing) for layer in range(self._layers)], dim=1)

    def _route(self, route: Callable[..., Any], layer: int, experts: int, top_k: int, *args: Any, **kwargs: Any) -> Any:
        replayed = None if self._replayed is None else self._replayed[:, layer]
        answer = _Answer(experts, top_k, replayed, self._known)
        with answer:
            routed = route(*args, **kwargs)
        if answer.choice is None:
            raise RuntimeError(f"the router of layer {layer} chose its experts without torch.topk over all {experts}")
        if self._seen is not None:
            self._seen[layer] = answer.choice
        return routed


class _Answer(TorchFunctionMode):
    """Replaces the result of the one `torch.topk` by which a router chooses."""

    def __init__(self, experts: int, top_k: int, replayed_Nk: Tensor | None, known_N: Tensor | None) -> None:
        super().__init__()
        self.experts, self.top_k, self.replayed_Nk, self.known_N = experts, top_k, replayed_Nk, known_N
        self.choice: Choice | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        scores_NE, k = args[0], args[1] if len(args) > 1 else kwargs.get("k")
        if scores_NE.dim() != 2 or (scores_NE.shape[-1], k) != (self.experts, self.top_k):  # not a choice of experts
            return func(*args, **kwargs)
        with torch.no_grad():
            own_Nk = func(scores_NE.detach(), *args[1:], **kwargs)[1]
        used_Nk = own_Nk
        if self.replayed_Nk is not None:
            used_Nk = self.replayed_Nk.to(scores_NE.device, torch.int64)
            if self.known_N is not None:
                used_Nk = torch.where(self.known_N.to(scores_NE.device).unsqueeze(-1), used_Nk, own_Nk)
        self.choice = Choice(own_Nk, used_Nk)
        return torch.return_types.topk((scores_NE.gather(-1, used_Nk), used_Nk))


def routing_agreement(seen: Mapping[int, Choice], rollout_NLk: Tensor, known_N: Tensor) -> dict[str, Statistic]:
    """Return the share of used choices that equal the rollout's, of known tokens, over all layers and for each layer.

    `mismatch/routing_changed_fraction` is the share of the trainer's own choices that replay has changed.
    """
    agreement = {layer: equal_choices(seen[layer].used, rollout_NLk[:, layer], known_N) for layer in sorted(seen)}
    own = functools.reduce(Mean.merge, (equal_choices(choice.own, choice.used, known_N) for choice in seen.values()))
    return {
        AGREEMENT: functools.reduce(Mean.merge, agreement.values()),
        **{f"{AGREEMENT}/layer_{layer:02d}": each for layer, each in agreement.items()},
        CHANGED: Mean(own.number - own.total, own.number),
    }


def equal_choices(one_Nk: Tensor, other_Nk: Tensor, known_N: Tensor) -> Mean:
    """Return the share of the first choices that are also in the second; a token's experts are a set."""
    other_Nk, known_N = other_Nk.to(one_Nk.device, one_Nk.dtype), known_N.to(one_Nk.device)
    equal_Nk = (one_Nk.unsqueeze(-1) == other_Nk.unsqueeze(-2)).any(dim=-1) & known_N.unsqueeze(-1)
    return Mean(equal_Nk.sum().double(), (known_N.sum() * one_Nk.shape[-1]).double())


def known_tokens(experts_NLk: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] bool: the tokens whose choice the rollout returned; packed sequences begin at `offsets` ([B + 1]).

    The last token of a sequence never went through the rollout's model; verl fills missing rows with 0 in all layers.
    """
    known_N = torch.ones(len(experts_NLk), dtype=torch.bool, device=experts_NLk.device)
    if experts_NLk.shape[-1] > 1:
        known_N = (experts_NLk != 0).flatten(1).any(dim=-1)
    known_N[offsets[1:].to(known_N.device) - 1] = False
    return known_N


def without_padding(choices_NLk: Tensor, offsets: Tensor) -> Tensor:
    """Return the choices without padding, packed by `offsets`, from sequences packed or padded on the right."""
    if len(choices_NLk) == int(offsets[-1]):
        return choices_NLk
    lengths_B = offsets.diff().to(choices_NLk.device)
    padded_BTLk = choices_NLk.unflatten(0, (len(lengths_B), -1))
    return padded_BTLk[torch.arange(padded_BTLk.shape[1], device=choices_NLk.device) < lengths_B[:, None]]


def _chooser(module: Any) -> tuple[nn.Module, str, int, int] | None:
    """Return a module's router or None: its owner, method, number of experts, and number of chosen experts."""
    if hasattr(module, "route_tokens_to_experts") and hasattr(module, "gate"):
        return module, "route_tokens_to_experts", module.gate.weight.shape[0], module.top_k
    if type(module).__name__.endswith("TopKRouter") and hasattr(module, "top_k"):
        return module, "forward", module.weight.shape[0], module.top_k
    return None
