"""The mixin that gives verl's FSDP engine a shadow, and measures where the trainer asks for it."""

import contextlib
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.shadow import ShadowModel, build_shadow, straight_through
from verl_precision.integration.trainer.measurement import REQUEST, measure


class ShadowForward:
    """The shadow: built, refreshed, moved and used where the config asks for it; and what is measured with it."""

    engine_config: Any
    module: Any
    _precise: bool
    _shadow: ShadowModel | None = None
    _request: dict[str, Any] | None = None
    _first_update = True
    _steps = 0

    def _build_fsdp_module(self, module):
        if self._precise and self.engine_config.shadow.enabled and not self.engine_config.forward_only:
            # First: what verl's builder notes about the engine must be, in the end, the actor's.
            self._shadow = build_shadow(self, module, super()._build_fsdp_module)
        return super()._build_fsdp_module(module)

    def train_batch(self, data, loss_function):
        """Train on a mini-batch; if the trainer asks for it, the first one of a step is measured.

        At the first update the weights are still those the rollout was drawn with: later ones have drifted.
        """
        asked = tu.get(data, key=REQUEST, default=None)
        if asked is None:
            return super().train_batch(data, loss_function)
        self._request = asked if self._first_update else None
        try:
            return super().train_batch(data, loss_function)
        finally:
            self._request = None
            self._first_update = tu.get(data, key="update_lr_scheduler", default=True)
            self._steps += self._first_update

    def forward_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step; with `ratio_source=shadow`, every log-prob has the shadow's value.

        Without gradients the shadow alone runs. With gradients both run, and the loss gets log-probs that are the
        shadow's in value and the training forward's in gradient.
        """
        step = super().forward_step
        ratio_from_shadow = self._shadow is not None and self.engine_config.shadow.ratio_source == "shadow"
        if forward_only and ratio_from_shadow:
            with self._shadow.in_place_of_the_actor(self):  # type: ignore[union-attr]
                return step(micro_batch, loss_function, forward_only)
        if forward_only or not (ratio_from_shadow or self._request):
            return step(micro_batch, loss_function, forward_only)
        if ratio_from_shadow and tu.get_non_tensor_data(data=micro_batch, key="distillation_use_topk", default=False):
            raise ConfigurationError(
                "top-k distillation takes its loss from logits, which the shadow does not give",
                setting="fsdp_config.shadow.ratio_source",
                value="shadow",
                allowed="training",
                remedy="Set ratio_source=training, or distillation without use_topk.",
            )
        every = self.engine_config.shadow.every_n_steps if self._shadow is not None else 0
        shadow = None
        if ratio_from_shadow or (every > 0 and self._steps % every == 0):
            with self._shadow.in_place_of_the_actor(self):  # type: ignore[union-attr]
                shadow = step(micro_batch, None, True)[1]["model_output"]["log_probs"]

        def loss_and_measurement(*args, **kwargs):
            if "model_output" not in kwargs:  # top-k distillation asks for its part of the logits
                return loss_function(*args, **kwargs)
            output = kwargs["model_output"]
            measured = measure(self._request, output["log_probs"], shadow, kwargs["data"]) if self._request else {}
            if ratio_from_shadow:
                flat = straight_through(shadow.values(), output["log_probs"].values())
                values = torch.nested.nested_tensor_from_jagged(flat, shadow.offsets())
                kwargs["model_output"] = {**output, "log_probs": values}
            loss, metrics = loss_function(*args, **kwargs)
            return loss, {**metrics, **measured}

        return step(micro_batch, loss_and_measurement, forward_only)

    def optimizer_step(self):
        """Do the engine's step; the shadow's weights are then old."""
        grad_norm = super().optimizer_step()
        if self._shadow is not None:
            self._shadow.outdate()
        return grad_norm

    def load_checkpoint(self, *args, **kwargs):
        """Load the engine's checkpoint; the shadow's weights are then old."""
        super().load_checkpoint(*args, **kwargs)
        if self._shadow is not None:
            self._shadow.outdate()

    def to(self, device, model=True, optimizer=True, grad=True):
        """Move the engine, and the shadow with the actor's weights."""
        moved = super().to(device, model, optimizer, grad)
        if self._shadow is not None and model:
            (offload_fsdp_model_to_cpu if device == "cpu" else load_fsdp_model_to_gpu)(self._shadow.module)
        return moved

    def disable_adapter(self):
        """Leave LoRA out, of the shadow as well: it then stands for the reference."""
        without = super().disable_adapter()
        if self._shadow is None:
            return without
        both = contextlib.ExitStack()
        both.enter_context(without)
        both.enter_context(self._shadow.module.disable_adapter())
        return both
