"""An operation's own error: vLLM's output less that of transformers' counterpart, on equal inputs.

`injected` adds such errors to transformers' forward, each where it arises.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_precision.base.files import table_of

_KINDS = table_of(__file__, "operation_kinds.yaml")
KINDS = tuple(dict.fromkeys(kind for kind, *_ in _KINDS.values()))


@dataclass(frozen=True)
class OperationError:
    """An operation's own error, [T, ...]."""

    kind: str
    layer: int | None
    name: str  # of vLLM's module
    modules: list[nn.Module]  # transformers' counterparts; none for a kind that is no module there
    value: tuple[Tensor, ...]
    relative: float


def operation_errors(
    model: Any, calls: Sequence[dict[str, Any]], again: Callable[..., tuple[Tensor, ...] | None] | None = None
) -> Iterator[OperationError]:
    """Compute every recorded operation `again` from its inputs, by transformers; leave out what has no counterpart."""
    again = again or _again
    rotations = 0
    routers: dict[int | None, Tensor] = {}  # layer -> error of the router's scores
    length, head = len(calls[0]["outputs"][0]), whole_head(calls)
    known = dict(model.named_modules())
    for call in calls:
        name, inputs, outputs = call["name"], call["inputs"], call["outputs"]
        kind, *paths = _KINDS[name.rpartition(".")[2]]
        found = re.search(r"layers\.(\d+)\.", name)
        layer = int(found[1]) if found else None
        if kind == "rotary":  # one module for all layers
            layer, rotations = rotations, rotations + 1
        if kind == "head" and call is not head:
            continue
        if kind in ("input norm", "post-attention norm", "final norm") and len(inputs) == 2:
            total = again(model, "residual", layer, [], inputs, length, None) or ()
            yield OperationError("residual", layer, name, [], *_difference((outputs[1],), total))
            inputs = (outputs[1],)
        places = [path.format(block=f"model.layers.{layer}") for path in paths]
        modules = [known[place] for place in places] if known.keys() >= set(places) else []
        with torch.no_grad():
            expected = again(model, kind, layer, modules, inputs, length, routers.get(layer))
        if expected is not None:
            error = OperationError(kind, layer, name, modules, *_difference(outputs[: len(expected)], expected))
            if kind == "router":
                routers[layer] = error.value[0]
            yield error


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], float]:
    """Return found less expected, and how large that is relative to the expected."""
    value = tuple(a.reshape(b.shape) - b for a, b in zip(found, expected, strict=True))
    size, of_error = (sum(float(t.square().sum()) for t in tensors) ** 0.5 for tensors in (expected, value))
    return value, of_error / max(size, 1e-30)


def _again(
    model: Any, kind: str, layer: int | None, modules: Sequence[nn.Module], inputs: Sequence[Tensor], length: int,
    router: Tensor | None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Return what transformers computes from an operation's inputs; None if there is no counterpart."""
    if modules:
        return (torch.cat([module(inputs[0]) for module in modules], dim=-1),)
    block: Any = model.model.layers[layer] if layer is not None else None
    attention: Any = getattr(block, "self_attn", None)
    mlp: Any = getattr(block, "mlp", None)

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.view(1, length, -1, attention.head_dim).transpose(1, 2)

    match kind:
        case "residual":
            return (inputs[0] + inputs[1],)
        case "rotary":
            positions, query, key = inputs
            cos, sin = model.model.rotary_emb(query[None], positions[None])
            rotated = _modeling(model).apply_rotary_pos_emb(by_head(query), by_head(key), cos, sin)
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
            with _AddedToScores({id(mlp.gate.weight): router}):
                output = mlp(inputs[0][None])
            return ((output[0] if isinstance(output, tuple) else output)[0],)
    return None


@contextmanager
def injected(model: Any, errors: Sequence[OperationError]) -> Iterator[None]:
    """Inside, add errors to the same places of transformers' forward."""
    layers = model.model.layers
    rotations: dict[int | None, tuple[Tensor, ...]] = {}
    scores: dict[int, Tensor] = {}
    with ExitStack() as stack:

        def after(module: nn.Module, value: Tensor) -> None:
            stack.callback(module.register_forward_hook(partial(_add_to_output, value=value)).remove)

        def before(module: nn.Module, value: Tensor) -> None:
            stack.callback(module.register_forward_pre_hook(partial(_add_to_input, value=value)).remove)

        for error in errors:
            value: Tensor = error.value[0]
            if error.modules:
                sizes = [getattr(module, "out_features", value.shape[-1]) for module in error.modules]
                for module, part in zip(error.modules, value.split(sizes, -1), strict=True):
                    after(module, part)
                continue
            block: Any = layers[error.layer] if error.layer is not None else None
            match error.kind:
                # The sum before a norm: equal to an error of what was added last.
                case "residual" if error.name.endswith("post_attention_layernorm"):
                    after(block.self_attn.o_proj, value)
                case "residual":
                    after(layers[-1 if error.layer is None else error.layer - 1].mlp, value)
                case "rotary":
                    rotations[error.layer] = error.value
                case "attention":
                    before(block.self_attn.o_proj, value)
                case "activation":
                    before(block.mlp.down_proj, value)
                case "router":
                    scores[id(block.mlp.gate.weight)] = value
                case "experts":
                    after(block.mlp, value)
        if rotations:
            source = _modeling(model)
            original = source.apply_rotary_pos_emb
            stack.callback(setattr, source, "apply_rotary_pos_emb", original)
            source.apply_rotary_pos_emb = _rotated(original, rotations)
        if scores:
            stack.enter_context(_AddedToScores(scores))
        yield


def _add_to_output(module: nn.Module, args: tuple, output: Any, value: Tensor) -> Any:
    return (_sum(output[0], value), *output[1:]) if isinstance(output, tuple) else _sum(output, value)


def _add_to_input(module: nn.Module, args: tuple, value: Tensor) -> Any:
    return (_sum(args[0], value), *args[1:])


def _sum(tensor: Tensor, value: Tensor) -> Tensor:
    """Add an error of the first places, [T, ...], to [1, T', ...] or [T', ...]."""
    tensor = tensor.clone()
    rows = tensor[0] if tensor.dim() > value.dim() else tensor
    rows[: len(value)] += value.reshape(len(value), *rows.shape[1:])
    return tensor


def _rotated(function: Callable[..., Any], errors: dict[int | None, tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Add an error to transformers' rotary function in each layer; the layers call it one after the other."""
    layers = count()

    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated, error = function(*args, **kwargs), errors.get(next(layers))
        if error is None:
            return rotated
        both = zip(rotated, error, strict=True)
        return tuple(t + e.view(len(e), -1, t.shape[-1]).transpose(0, 1)[None] for t, e in both)

    return rotate


class _AddedToScores(TorchFunctionMode):
    """Inside, the scores that routers' weights give have errors, which are known by the `id` of the weight."""

    def __init__(self, errors: dict[int, Tensor]) -> None:
        super().__init__()
        self.errors = errors

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Do what was asked, and add the error to the scores."""
        found = func(*args, **(kwargs or {}))
        scores = func is nn.functional.linear and id(args[1]) in self.errors
        return found + self.errors[id(args[1])] if scores else found


def _modeling(model: Any) -> Any:
    """Return the module of transformers that defines a model."""
    return importlib.import_module(type(model.model).__module__)


def whole_head(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the call that gave the logits of all places; another one gives those of the last."""
    return max((c for c in calls if c["name"].endswith("logits_processor")), key=lambda c: len(c["outputs"][0]))
