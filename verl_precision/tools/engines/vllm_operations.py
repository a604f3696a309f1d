"""What every operation of a model of vLLM gets and gives in one forward, for `tools/gap/explain/operations.py`.

Only where vLLM runs the modules themselves: on a CPU, and on a GPU with enforce_eager=True. A compiled forward leaves
nothing here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.base.files import new_file

# Last part of the names of modules that are recorded; models of one family have some of them.
_RECORDED = (
    *("embed_tokens", "input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"),
    *("qkv_proj", "rotary_emb", "attn", "o_proj", "gate_up_proj", "act_fn", "down_proj", "gate", "experts"),
    "logits_processor",
)


class OperationRecorder:
    """Hooks on a model; between `start` and `write` they keep what goes in and out."""

    def __init__(self, model: nn.Module) -> None:
        self._dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self._calls: list[dict[str, Any]] | None = None
        self._open: list[tuple[Tensor, ...]] = []
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in _RECORDED:
                module.register_forward_pre_hook(self._before, with_kwargs=True)
                module.register_forward_hook(self._after(name), with_kwargs=True)

    def start(self) -> None:
        """Begin a record."""
        self._calls, self._open = [], []

    def write(self, path: Path, token_ids: Sequence[int]) -> None:
        """End the record, and write it: token ids, dtype, and the calls in their order, in FP32."""
        calls, self._calls = self._calls, None
        with new_file(path, replace=True) as scratch:
            torch.save({"token_ids": list(token_ids), "dtype": self._dtype, "calls": calls}, scratch)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._calls is not None:  # cloned now: vLLM's norms overwrite what they get
            self._open.append(_kept((*args, *kwargs.values())))

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if self._calls is not None:
                outputs = _kept(output if isinstance(output, tuple) else (output,))
                self._calls.append({"name": name, "inputs": self._open.pop(), "outputs": outputs})

        return hook


def _kept(values: Sequence[Any]) -> tuple[Tensor, ...]:
    tensors = (value.detach() for value in values if isinstance(value, Tensor))
    return tuple(x.to("cpu", torch.float32 if x.is_floating_point() else x.dtype, copy=True) for x in tensors)
