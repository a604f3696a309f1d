"""transformers' forward with the errors of vLLM's operations added, each where it arises."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from verl_precision.tools.gap.explain.operation_error import AddedToScores, OperationError, modeling, modules_of


@contextmanager
def injected(model: Any, errors: Sequence[OperationError]) -> Iterator[None]:
    """Inside, add errors to the same places of transformers' forward."""
    layers = model.model.layers
    rotations: dict[int | None, OperationError] = {}
    with ExitStack() as stack:

        def after(module: nn.Module, value: Tensor) -> None:
            stack.callback(module.register_forward_hook(partial(_add_to_output, value=value)).remove)

        def before(module: nn.Module, value: Tensor) -> None:
            stack.callback(module.register_forward_pre_hook(partial(_add_to_input, value=value)).remove)

        for error in errors:
            value: Tensor = error.value[0]
            if modules := modules_of(model, error.kind, error.layer, error.name):
                sizes = [getattr(module, "out_features", value.shape[-1]) for module in modules]
                for module, part in zip(modules, value.split(sizes, -1), strict=True):
                    after(module, part)
                continue
            block: Any = layers[error.layer] if error.layer is not None else None
            match error.kind:
                case "residual":  # the sum before a norm: equal to an error of what was added last
                    if error.name.endswith("post_attention_layernorm"):
                        after(block.self_attn.o_proj, value)
                    else:
                        after(layers[error.layer - 1 if error.layer is not None else -1].mlp, value)
                case "rotary":
                    rotations[error.layer] = error
                case "attention":
                    before(block.self_attn.o_proj, value)
                case "activation":
                    before(block.mlp.down_proj, value)
                case "router":
                    gate = block.mlp.gate
                    stack.callback(delattr, gate, "forward")
                    gate.forward = partial(_with_scores, gate.forward, value, gate.weight)
                case "experts":
                    after(block.mlp, value)
        if rotations:
            source = modeling(model)
            original = source.apply_rotary_pos_emb
            stack.callback(setattr, source, "apply_rotary_pos_emb", original)
            source.apply_rotary_pos_emb = _Rotated(original, rotations)
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


def _with_scores(forward: Callable[..., Any], value: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    with AddedToScores(value, weight):
        return forward(*args, **kwargs)


class _Rotated:
    """transformers' rotary function, with an error added in each layer; the layers call it one after the other."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, Tensor]], errors: dict[int | None, OperationError]
    ) -> None:
        self.function, self.errors, self.layer = function, errors, 0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        rotated: tuple[Tensor, ...] = self.function(*args, **kwargs)
        error = self.errors.get(self.layer)
        self.layer += 1
        if error is None:
            return rotated
        by_head = (
            value.view(len(value), -1, t.shape[-1]).transpose(0, 1)[None]
            for value, t in zip(error.value, rotated, strict=True)
        )
        return tuple(t + value for t, value in zip(rotated, by_head, strict=True))
