"""Which dtype a forward really computed in: recorded at every module that multiplies by weights, and checked."""

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.errors import PrecisionContradictionError

logger = logging.getLogger("verl_precision.engine")

# Modules named in an error message.
_SHOWN = 5


class ForwardDtypes:
    """Hooks that record the dtype of each matrix product's result.

    Attributes:
        expected: what the config asks for.
        seen: dtype -> number of products since the last `check`.
    """

    def __init__(self, module: nn.Module, role: str, expected: torch.dtype, exempt: nn.Module | None = None) -> None:
        """Put a hook on every module with a matrix of its own, embeddings left out: they look up, and multiply nothing.

        Args:
            module: the model, sharded or not.
            role: of the engine, as the message names it, e.g. "actor".
            expected: compute dtype of the config.
            exempt: a module that computes in another dtype on purpose.
        """
        self.expected = expected
        self.seen: Counter[torch.dtype] = Counter()
        self._role = role
        self._wrong: dict[str, torch.dtype] = {}
        self._said = False
        for name, part in module.named_modules():
            matrices = [p for p in part.parameters(recurse=False) if p.dim() > 1]
            if matrices and not isinstance(part, nn.Embedding) and part is not exempt:
                part.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.seen[output.dtype] += 1
                if output.dtype != self.expected:
                    self._wrong[name] = output.dtype

        return record

    def check(self) -> None:
        """Compare what the last forward did with the config; once, say what was seen.

        Raises:
            PrecisionContradictionError: naming modules, the dtype found and the one asked for.
        """
        seen, wrong = dict(self.seen), dict(self._wrong)
        self.seen.clear()
        self._wrong.clear()
        if wrong:
            named = "; ".join(f"{name}: {_name(dtype)}" for name, dtype in list(wrong.items())[:_SHOWN])
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise PrecisionContradictionError(
                f"in the {self._role}'s forward {len(wrong)} modules gave another dtype: {named}{more}. Usual causes: "
                "autocast switched off or nested with another dtype, a model that casts by itself, a kernel without "
                "this dtype",
                setting="fsdp_config.mixed_precision.param_dtype",
                value=_name(self.expected),
                allowed="that dtype everywhere",
                remedy="Choose the precision that the model supports, e.g. precision=bf16.",
            )
        if not self._said:
            self._said = True
            if seen:
                logger.info(
                    "%s forward verified: %d matrix products, all in %s",
                    self._role,
                    sum(seen.values()),
                    _name(self.expected),
                )
            else:
                logger.warning(
                    "%s forward NOT verified: no module with a matrix of its own was called (fused layers?)", self._role
                )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
