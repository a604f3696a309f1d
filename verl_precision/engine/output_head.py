"""The output head in FP32: logits are the longest sums of the model, and rounded last."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl_precision.errors import ConfigurationError


def compute_in_fp32(model: nn.Module) -> nn.Module:
    """Make a model's output head compute x·Wᵀ + b in FP32, and return the head.

    Args:
        model: a Hugging Face model (or PEFT's wrapper), before it is sharded; changed in place.

    Raises:
        ConfigurationError: if the head is not a plain linear layer.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        raise ConfigurationError(
            f"the output head of {type(model).__name__} is a {type(head).__name__}",
            setting="fsdp_config.fp32_output_head",
            value=True,
            allowed="a model whose head is a linear layer",
            remedy="Set it to False.",
        )
    head.forward = MethodType(_forward, head)  # type: ignore[method-assign]
    return head


def _forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)
