"""Is each operation of a record that of exact arithmetic, to the last bit? Computed again from the same inputs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.engine.arithmetic_choice import INNER
from verl_precision.tools.arithmetic import operations
from verl_precision.tools.arithmetic.attention import attention, packed
from verl_precision.tools.gap.explain.operation_error import operation_errors


def first_unequal(model: Any, record: dict[str, Any]) -> str | None:
    """Return the first operation whose result has another bit; None if none has. The model is as in `compare`."""
    again = partial(_exactly, getattr(torch, record["dtype"]), INNER[record["arithmetic"]])
    errors = operation_errors(model, record["calls"], again)
    return next((f"{error.kind} ({error.name})" for error in errors if error.relative > 0), None)


def _exactly(
    dtype: torch.dtype, inner: Any, model: Any, kind: str, layer: int | None, modules: Sequence[nn.Module],
    inputs: Sequence[Tensor], length: int, router: Tensor | None,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Compute an operation of `operation_error.KINDS` as both engines do with an arithmetic that is exact."""
    x, *others = (each.to(dtype) if each.is_floating_point() else each for each in inputs)
    block: Any = model.model.layers[layer] if layer is not None else None
    own: Any = getattr(block, "self_attn", None)
    mlp: Any = getattr(block, "mlp", None)

    def of(weight: Any) -> Any:
        return None if weight is None else weight.to(dtype)

    def heads(tensor: Tensor) -> Tensor:
        return tensor.view(length, -1, own.head_dim)

    linear, found = partial(operations.linear, inner=inner), list[Tensor]()
    if kind == "residual":
        found = [x + others[0]]
    elif kind == "embeddings":
        found = [of(modules[0](x))]
    elif modules and kind.endswith("norm"):
        module: Any = modules[0]
        found = [operations.rms_norm(x, of(module.weight), module.variance_epsilon, inner=inner)]
    elif modules:
        found = [torch.cat([linear(x, of(each.weight), of(each.bias)) for each in modules], dim=-1)]
    elif kind == "rotary":
        turn = operations.rotary_frequencies(model.config.rope_parameters["rope_theta"], own.head_dim)
        found = [operations.rotary(heads(each), x, turn, inner=inner).flatten(1) for each in others]
    elif kind == "attention":
        spans = packed(torch.arange(length, device=x.device)[None], None)
        q, k, v = (heads(each) for each in (x, *others))
        found = [attention(q, k, v, own.scaling, spans, inner=inner).flatten(1)]
    elif kind == "activation" and hasattr(mlp, "act_fn"):
        found = [operations.silu_and_mul(*x.chunk(2, dim=-1), inner=inner)]
    return tuple(each.float() for each in found) or None
