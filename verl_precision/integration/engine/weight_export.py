"""Weights on their way to the rollout and into an export: as exact as the trainer holds them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys

from verl_precision.base.files import write_file
from verl_precision.engine.settings import DTYPES
from verl_precision.weight_sync.bf16_grid import Bf16Grid
from verl_precision.weight_sync.manifest import send_with_manifest
from verl_precision.weight_sync.report import ReportBox
from verl_precision.weight_sync.stochastic_rounding import rounded_stream


class ExactWeights:
    """Merged LoRA without verl's rounding to BF16; weights that leave are watched, and a manifest closes the stream."""

    engine_config: Any
    module: Any
    lr_scheduler: Any
    is_mp_src_rank_with_outputs: Any
    _is_offload_param: bool
    _precise: bool
    _reports: ReportBox | None = None
    _grid: Bf16Grid | None = None

    @property
    def _sends_manifest(self) -> bool:
        return self._precise and self.engine_config.send_weight_manifest

    def get_per_tensor_param(self, *args, **kwargs):
        """Return verl's weight stream, watched and perhaps rounded; if the receiver reads it, closed by a manifest."""
        if not (self._precise or self._sends_manifest):
            return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        if self._precise:
            if self._grid is None:
                self._grid = Bf16Grid()
            weights = self._grid.watch(weights)
            if self.engine_config.stochastic_rounding_to is not None:
                dtype = getattr(torch, DTYPES[self.engine_config.stochastic_rounding_to])
                # The schedule counts the steps that changed the weights, and checkpoints hold it.
                weights = rounded_stream(weights, dtype, step=self.lr_scheduler.last_epoch)
        if self._sends_manifest:
            if self._reports is None:
                self._reports = ReportBox()
            weights = send_with_manifest(weights, self._reports.new_address())
        return weights, peft_config

    def train_batch(self, data, loss_function):
        """Train on a mini-batch; at the last one of a step also report on the weights that were sent before it."""
        outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        reports = self._reports is not None or self._grid is not None
        last_of_step = tu.get(data, key="update_lr_scheduler", default=True)
        if reports and last_of_step and self.is_mp_src_rank_with_outputs():
            report = None if self._reports is None else self._reports.take()
            found = {} if report is None else report.metrics()
            found |= {} if self._grid is None else self._grid.take()
            outputs["metrics"].update({key: [value] for key, value in found.items()})
        return outputs

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        return self._merged_lora() if self._precise else super()._merged_lora_per_tensor_param()  # type: ignore[misc]

    def _merged_lora(self) -> Iterator[tuple[str, Tensor]]:
        device = get_device_id()
        try:
            # Open until the last tensor has been taken: on leaving, the base weights are put back in place.
            with merged_lora_context(self.module, backup_adapters=True):
                wrapped = getattr(self.module, "_fsdp_wrapped_module", self.module)
                merged = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), wrapped)
                for name, weight in merged.items():
                    if isinstance(weight, DTensor):
                        weight = weight.to(device, non_blocking=True).full_tensor()  # type: ignore[attr-defined]
                    yield name, weight.detach().clone()  # on one rank the whole is the live storage
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)


def write_export_dtype(folder: str, dtype: str) -> None:
    """Say in an exported model's config.json which dtype it was trained to be used in.

    verl writes the dtype of the model the run started from, BF16 for most: who loads the export by its config would
    round the weights to it. The weights themselves are exported in FP32.

    Args:
        folder: Folder of a Hugging Face model; nothing is done without a config.json in it.
        dtype: Name of the dtype in torch, e.g. "float16".
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)  # the older name
    settings["dtype"] = dtype
    write_file(path, json.dumps(settings, indent=2) + "\n", replace=True)
