"""Do activations and gradients fit FP16? A few prompts forward and backward, layer by layer.

Computed in FP32, so that the true magnitude is seen: in FP16 an overflow is inf in one layer and NaN in all after it,
and says neither where it began nor how far it went. The loss is the mean negative log-likelihood of the prompts' own
tokens, whose gradients are those of a policy gradient with advantage 1; they are reported times the loss scale, since
that is what FP16 holds. A peak of activations far below 65504 says nothing about the backward pass.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from verl_precision.tools.checking.checkpoint import FP16_MAX

LOSS_SCALE = 65536.0  # torch's and verl's initial one
PROMPTS = (
    "Question: Natalia sold clips to 48 friends, and half as many in May. How many in all?\nAnswer: 48 + 24 = 72.",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "0 1 1 2 3 5 8 13 21 34 55 89 144 233 377 610 987 1597 2584 4181 6765",
)


@dataclass(frozen=True)
class LayerReport:
    """One module of the model."""

    name: str  # path of the module
    activation: float  # largest magnitude of its output
    output_gradient: float  # largest magnitude of the gradient of its output, loss scale 1
    weight_gradient: float  # largest magnitude of the gradient of its own parameters, loss scale 1

    @property
    def gradient(self) -> float:
        """The larger of the two gradients: FP16 training holds both in FP16."""
        return max(self.output_gradient, self.weight_gradient)


@dataclass(frozen=True)
class ActivationReport:
    """A whole model."""

    layers: list[LayerReport]  # one for each module that computes, the ones with least headroom first
    loss_scale: float  # factor that gradients are multiplied by
    tokens: int  # number of tokens looked at

    def headroom(self, layer: LayerReport) -> tuple[float | None, float | None]:
        """Return 65504 divided by the activation, and by the scaled gradient; below 1 it overflows, None if zero."""
        forward, backward = layer.activation, layer.gradient * self.loss_scale
        return FP16_MAX / forward if forward else None, FP16_MAX / backward if backward else None

    @property
    def largest_safe_scale(self) -> float:
        """The largest power of two at which no gradient of this batch overflows."""
        worst = max((layer.gradient for layer in self.layers), default=0.0)
        scale = 2.0**24
        while scale * worst > FP16_MAX and scale > 2.0**-24:
            scale /= 2
        return scale

    @property
    def forward_overflows(self) -> list[str]:
        """Names of modules whose output is infinite in FP16: no loss scale helps."""
        return [layer.name for layer in self.layers if not layer.activation <= FP16_MAX]

    @property
    def backward_overflows(self) -> list[str]:
        """Names of modules whose gradient, at this loss scale, is infinite in FP16."""
        return [layer.name for layer in self.layers if not layer.gradient * self.loss_scale <= FP16_MAX]

    @property
    def ok(self) -> bool:
        """Whether FP16 holds everything, if need be at a smaller loss scale of at least 1."""
        return not self.forward_overflows and self.largest_safe_scale >= 1

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.forward_overflows:
            return f"not for FP16: the output of {self.forward_overflows[0]} exceeds 65504. Use precision=bf16."
        if not self.backward_overflows:
            return f"activations fit FP16, and gradients at loss scale {self.loss_scale:g}"
        gradient = f"the gradient of {self.backward_overflows[0]}"
        if not self.ok:
            return f"not for FP16: {gradient} exceeds 65504 even at loss scale 1. Use precision=bf16."
        fits = f"fits FP16 at a loss scale of {self.largest_safe_scale:g} or less"
        return f"{fits}; at {self.loss_scale:g} {gradient} overflows, and dynamic scaling would skip steps"

    def as_dict(self) -> dict:
        """Return it for machines."""
        names = ("headroom", "gradient_headroom")
        layers = [asdict(layer) | dict(zip(names, self.headroom(layer), strict=True)) for layer in self.layers]
        verdict = {"ok": self.ok, "verdict": self.verdict, "largest_safe_scale": self.largest_safe_scale}
        return {**verdict, "loss_scale": self.loss_scale, "tokens": self.tokens, "layers": layers}


def measure_activations(
    path: Path, prompts: Sequence[str] = PROMPTS, loss_scale: float = LOSS_SCALE
) -> ActivationReport:
    """Run prompts forward and backward in FP32 and record every module's output and its gradient.

    The model, a folder in Hugging Face format with tokenizer, is loaded whole, in FP32: 4 bytes a parameter. Prompts
    run one at a time. Each gradient is dropped once it has been looked at.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    layers = _record(model, tokens)
    layers.sort(key=lambda layer: max(layer.activation, layer.gradient * loss_scale), reverse=True)
    return ActivationReport(layers, loss_scale, sum(t.numel() for t in tokens))


def _record(model, batches) -> list[LayerReport]:
    import torch

    activations: dict[str, float] = {}
    outputs: dict[str, float] = {}
    weights: dict[str, float] = {}

    def watch_output(module, inputs, output, name: str) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not isinstance(tensor, torch.Tensor):  # a container of tensors that were seen where they were made
            return
        _note(activations, name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: _note(outputs, name, gradient))

    def watch_weight(parameter, name: str) -> None:
        _note(weights, name, parameter.grad)
        parameter.grad = None  # one tensor's gradient at a time

    handles = [module.register_forward_hook(partial(watch_output, name=name)) for name, module in model.named_modules()]
    for name, parameter in model.named_parameters():  # each once, also one that two modules share
        owner = name.rpartition(".")[0]
        handles.append(parameter.register_post_accumulate_grad_hook(partial(watch_weight, name=owner)))
    try:
        for ids in batches:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return [LayerReport(n, activations[n], outputs.get(n, 0.0), weights.get(n, 0.0)) for n in activations]


def _note(known: dict[str, float], name: str, tensor) -> None:
    """Keep the largest magnitude; NaN counts as infinite, so that it is seen."""
    magnitude = float(tensor.detach().abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    known[name] = max(known.get(name, 0.0), magnitude)
