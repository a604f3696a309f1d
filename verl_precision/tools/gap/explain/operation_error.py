"""transformers' counterpart of each operation of vLLM: an operation's own error, on equal inputs."""

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Kinds of operations, in the order of a layer.
KINDS = (
    *("embeddings", "residual", "input norm", "qkv", "qk norm", "rotary", "attention", "output projection"),
    *("post-attention norm", "gate and up", "activation", "down", "router", "experts", "final norm", "head"),
)
_OF_MODULE = {
    "embed_tokens": "embeddings",
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


@dataclass(frozen=True)
class OperationError:
    """An operation's own error: vLLM's output less that of transformers on the same input, [T, ...]."""

    kind: str
    layer: int | None
    name: str  # of vLLM's module
    value: tuple[Tensor, ...]
    relative: float


def operation_errors(model: Any, calls: Sequence[dict[str, Any]]) -> Iterator[OperationError]:
    """Compute every recorded operation again from its inputs; leave out what has no counterpart."""
    inner, layer, rotations = model.model, None, 0
    routers: dict[int | None, Tensor] = {}  # layer -> error of the router's scores
    length = len(calls[0]["outputs"][0])
    head = whole_head(calls)
    for call in calls:
        name, inputs, outputs = call["name"], call["inputs"], call["outputs"]
        kind = _OF_MODULE[name.rpartition(".")[2]]
        if (found := re.search(r"layers\.(\d+)\.", name)) and kind != "rotary":
            layer = int(found[1])
        elif kind == "rotary":  # one module for all layers
            layer, rotations = rotations, rotations + 1
        else:
            layer = None
        if kind == "head" and call is not head:
            continue
        block = inner.layers[layer] if layer is not None else None
        if kind in ("input norm", "post-attention norm", "final norm") and len(inputs) == 2:
            total = inputs[0] + inputs[1]
            yield _error("residual", layer, name, (outputs[1],), (total,))
            inputs = (outputs[1],)
        with torch.no_grad():
            expected = _again(model, block, kind, name, inputs, length, routers.get(layer))
        if expected is not None:
            error = _error(kind, layer, name, outputs[: len(expected)], expected)
            if kind == "router":
                routers[layer] = error.value[0]
            yield error


def _error(
    kind: str, layer: int | None, name: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> OperationError:
    value = tuple(a.reshape(b.shape) - b for a, b in zip(found, expected, strict=True))
    size = sum(float(b.square().sum()) for b in expected) ** 0.5
    return OperationError(
        kind, layer, name, value, sum(float(v.square().sum()) for v in value) ** 0.5 / max(size, 1e-30)
    )


def _again(
    model: Any, block: Any, kind: str, name: str, inputs: tuple[Tensor, ...], length: int, router: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Return what transformers' modules give for an operation's inputs; None if there is no counterpart."""
    inner, x = model.model, inputs[0]
    attention: Any = getattr(block, "self_attn", None)
    mlp: Any = getattr(block, "mlp", None)
    match kind:
        case "embeddings":
            return (inner.embed_tokens(x),)
        case "input norm":
            return (block.input_layernorm(x),)
        case "post-attention norm":
            return (block.post_attention_layernorm(x),)
        case "final norm":
            return (inner.norm(x),)
        case "qkv" if hasattr(attention, "q_proj"):
            return (torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], dim=-1),)
        case "qk norm":
            return (getattr(attention, name.rpartition(".")[2])(x),)
        case "rotary":
            positions, query, key = inputs
            heads = [t.view(1, length, -1, attention.head_dim).transpose(1, 2) for t in (query, key)]
            cos, sin = inner.rotary_emb(query[None], positions[None])
            rotated = modeling(model).apply_rotary_pos_emb(*heads, cos, sin)
            return tuple(t[0].transpose(0, 1).flatten(1) for t in rotated)
        case "attention":
            query, key, value = (t.view(1, length, -1, attention.head_dim).transpose(1, 2) for t in inputs)
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=attention.scaling, enable_gqa=True
            )
            return (attended[0].transpose(0, 1).flatten(1),)
        case "output projection":
            return (attention.o_proj(x),)
        case "gate and up" if hasattr(mlp, "gate_proj"):
            return (torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1),)
        case "activation" if hasattr(mlp, "act_fn"):
            gate, up = x.chunk(2, dim=-1)
            return (mlp.act_fn(gate) * up,)
        case "down" if hasattr(mlp, "down_proj"):
            return (mlp.down_proj(x),)
        case "router" if hasattr(mlp, "gate"):
            return (nn.functional.linear(x, mlp.gate.weight),)
        case "experts" if router is not None:  # of the experts that vLLM's scores choose
            with AddedToScores(router, mlp.gate.weight):
                return (_tensor(mlp(x[None]))[0],)
        case "head":
            return (model.lm_head(x),)
    return None


def _tensor(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


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
