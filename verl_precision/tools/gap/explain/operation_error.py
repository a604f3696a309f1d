"""An operation's own error: vLLM's output less that of transformers' counterpart, on equal inputs."""

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The last part of the name of vLLM's module -> the kind of operation, in the order of a layer.
_KINDS = {
    "embed_tokens": "embeddings",
    "residual": "residual",  # the sum before a norm, which vLLM's norm computes
    "input_layernorm": "input norm",
    "qkv_proj": "qkv",
    "q_norm": "qk norm",
    "k_norm": "qk norm",
    "rotary_emb": "rotary",
    "attn": "attention",
    "o_proj": "output projection",
    "post_attention_layernorm": "post-attention norm",
    "gate_up_proj": "gate and up",
    "act_fn": "activation",
    "down_proj": "down",
    "gate": "router",
    "experts": "experts",
    "norm": "final norm",
    "logits_processor": "head",
}
KINDS = tuple(dict.fromkeys(_KINDS.values()))
# The modules of transformers that together compute the same: of several, vLLM's output has all, one after the other.
_MODULES = {
    "embeddings": ("model.embed_tokens",),
    "input norm": ("{block}.input_layernorm",),
    "qkv": ("{block}.self_attn.q_proj", "{block}.self_attn.k_proj", "{block}.self_attn.v_proj"),
    "qk norm": ("{block}.self_attn.{name}",),
    "output projection": ("{block}.self_attn.o_proj",),
    "post-attention norm": ("{block}.post_attention_layernorm",),
    "gate and up": ("{block}.mlp.gate_proj", "{block}.mlp.up_proj"),
    "down": ("{block}.mlp.down_proj",),
    "final norm": ("model.norm",),
    "head": ("lm_head",),
}


@dataclass(frozen=True)
class OperationError:
    """An operation's own error, [T, ...]."""

    kind: str
    layer: int | None
    name: str  # of vLLM's module
    value: tuple[Tensor, ...]
    relative: float


def operation_errors(model: Any, calls: Sequence[dict[str, Any]]) -> Iterator[OperationError]:
    """Compute every recorded operation again from its inputs; leave out what has no counterpart."""
    layer, rotations = None, 0
    routers: dict[int | None, Tensor] = {}  # layer -> error of the router's scores
    length = len(calls[0]["outputs"][0])
    head = whole_head(calls)
    for call in calls:
        name, inputs, outputs = call["name"], call["inputs"], call["outputs"]
        kind = _KINDS[name.rpartition(".")[2]]
        if (found := re.search(r"layers\.(\d+)\.", name)) and kind != "rotary":
            layer = int(found[1])
        elif kind == "rotary":  # one module for all layers
            layer, rotations = rotations, rotations + 1
        else:
            layer = None
        if kind == "head" and call is not head:
            continue
        if kind in ("input norm", "post-attention norm", "final norm") and len(inputs) == 2:
            yield _error("residual", layer, name, (outputs[1],), (inputs[0] + inputs[1],))
            inputs = (outputs[1],)
        with torch.no_grad():
            expected = _again(model, kind, layer, name, inputs, length, routers.get(layer))
        if expected is not None:
            error = _error(kind, layer, name, outputs[: len(expected)], expected)
            if kind == "router":
                routers[layer] = error.value[0]
            yield error


def modules_of(model: Any, kind: str, layer: int | None, name: str) -> list[nn.Module]:
    """Return transformers' counterparts of a module of vLLM; none for a kind that is no module there."""
    leaf = name.rpartition(".")[2]
    paths = [path.format(block=f"model.layers.{layer}", name=leaf) for path in _MODULES.get(kind, ())]
    known = dict(model.named_modules())
    return [known[path] for path in paths] if known.keys() >= set(paths) else []


def _error(
    kind: str, layer: int | None, name: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> OperationError:
    value = tuple(a.reshape(b.shape) - b for a, b in zip(found, expected, strict=True))
    size, of_error = (sum(float(t.square().sum()) for t in tensors) ** 0.5 for tensors in (expected, value))
    return OperationError(kind, layer, name, value, of_error / max(size, 1e-30))


def _again(
    model: Any, kind: str, layer: int | None, name: str, inputs: tuple[Tensor, ...], length: int, router: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Return what transformers computes from an operation's inputs; None if there is no counterpart."""
    if modules := modules_of(model, kind, layer, name):
        return (torch.cat([module(inputs[0]) for module in modules], dim=-1),)
    block: Any = model.model.layers[layer] if layer is not None else None
    attention: Any = getattr(block, "self_attn", None)
    mlp: Any = getattr(block, "mlp", None)

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.view(1, length, -1, attention.head_dim).transpose(1, 2)

    match kind:
        case "rotary":
            positions, query, key = inputs
            cos, sin = model.model.rotary_emb(query[None], positions[None])
            rotated = modeling(model).apply_rotary_pos_emb(by_head(query), by_head(key), cos, sin)
            return tuple(t[0].transpose(0, 1).flatten(1) for t in rotated)
        case "attention":
            query, key, value = map(by_head, inputs)
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=attention.scaling, enable_gqa=True
            )
            return (attended[0].transpose(0, 1).flatten(1),)
        case "activation" if hasattr(mlp, "act_fn"):
            gate, up = inputs[0].chunk(2, dim=-1)
            return (mlp.act_fn(gate) * up,)
        case "router" if hasattr(mlp, "gate"):
            return (nn.functional.linear(inputs[0], mlp.gate.weight),)
        case "experts" if router is not None:  # of the experts that vLLM's scores choose
            with AddedToScores(router, mlp.gate.weight):
                output = mlp(inputs[0][None])
            return ((output[0] if isinstance(output, tuple) else output)[0],)
    return None


class AddedToScores(TorchFunctionMode):
    """Inside, a router's scores have an error: those that its weight gives."""

    def __init__(self, value: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.value, self.weight = value, weight

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Do what was asked, and add the error to the scores."""
        found = func(*args, **(kwargs or {}))
        return found + self.value if func is nn.functional.linear and args[1] is self.weight else found


def modeling(model: Any) -> Any:
    """Return the module of transformers that defines a model."""
    return importlib.import_module(type(model.model).__module__)


def whole_head(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the call that gave the logits of all places; another one gives those of the last."""
    return max((c for c in calls if c["name"].endswith("logits_processor")), key=lambda c: len(c["outputs"][0]))
