"""Verifies the dtype of every matrix product in a forward pass; an output head in FP32."""

from collections import Counter
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl_precision.base.errors import ConfigurationError, PrecisionContradictionError, filled
from verl_precision.base.loggers import engine as logger
from verl_precision.engine.settings import WORDS
from verl_precision.weight_sync.manifest import dtype_name

_SHOWN = 5  # modules named in an error message


class ForwardDtypes:
    """Hooks that record the dtype of each matrix product's result."""

    def __init__(self, module: nn.Module, role: str, expected: torch.dtype, exempt: nn.Module | None = None) -> None:
        """Put a hook on every module with a weight matrix, except embeddings and `exempt`; `role` names the engine."""
        self.expected, self._role = expected, role
        self.seen: Counter[torch.dtype] = Counter()  # number of products since the last `check`
        self._wrong: dict[str, torch.dtype] = {}
        self._said = False
        for name, part in module.named_modules():
            matrices = [p for p in part.parameters(recurse=False) if p.dim() > 1]
            if matrices and not isinstance(part, nn.Embedding) and part is not exempt:
                part.register_forward_hook(partial(self._record, name))

    def _record(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        product = output[0] if isinstance(output, tuple) else output  # a router's logits come first
        if isinstance(product, Tensor) and product.is_floating_point():
            self.seen[product.dtype] += 1
            if product.dtype != self.expected:
                self._wrong[name] = product.dtype

    def check(self) -> None:
        """Compare the last forward with the config, and raise PrecisionContradictionError; once, log the outcome."""
        products, wrong = self.seen.total(), self._wrong
        self.seen, self._wrong = Counter(), {}
        if wrong:
            named = "; ".join(f"{name}: {dtype_name(dtype)}" for name, dtype in list(wrong.items())[:_SHOWN])
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            words = filled(WORDS["forward"], role=self._role, wrong=len(wrong), named=named + more)
            raise PrecisionContradictionError(value=dtype_name(self.expected), **words)
        if not self._said and products:
            dtype = dtype_name(self.expected)
            logger.info("%s forward verified: %d matrix products, all in %s", self._role, products, dtype)
        elif not self._said:
            problem = "no module that holds a weight matrix was called (are the layers fused?)"
            logger.warning("%s forward NOT verified: %s", self._role, problem)
        self._said = True


def compute_head_in_fp32(model: nn.Module) -> nn.Module:
    """Make the output head of a Hugging Face model, not sharded yet, compute x·Wᵀ + b in FP32; return it."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        words = filled(WORDS["output head"], model=type(model).__name__, head=type(head).__name__)
        raise ConfigurationError(value=True, **words)
    head.forward = MethodType(_fp32_linear, head)  # type: ignore[method-assign]
    return head


def _fp32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)
