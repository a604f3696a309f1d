"""Weights on their way to the rollout and into an export: as exact as the trainer holds them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_name

from verl_precision.base.dtypes import torch_dtype
from verl_precision.base.files import write_file
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.weight_sync.bf16_grid import Bf16Grid
from verl_precision.weight_sync.manifest import send_with_manifest
from verl_precision.weight_sync.report import ReportBox
from verl_precision.weight_sync.stochastic_rounding import rounded_stream


class SentWeights:
    """The weights of an engine on their way to the rollout, and what there is to report of them."""

    def __init__(self) -> None:
        self._reports, self._grid = ReportBox(), Bf16Grid()

    def prepared(self, weights: Iterator[tuple[str, Tensor]], engine: Any) -> Iterator[tuple[str, Tensor]]:
        """Return a weight stream watched and perhaps rounded, and closed by a manifest if the receiver reads it.

        On a CPU weights can be loaded again by `VerifiedWeightSyncExtension` only, which reads the manifest.
        """
        config, closed = engine.engine_config, get_device_name() == "cpu"
        if isinstance(config, PrecisionFSDPConfig):
            weights = self._grid.watch(weights)
            if config.stochastic_rounding_to is not None:
                dtype = torch_dtype(config.stochastic_rounding_to)
                # The schedule counts the steps that changed the weights, and checkpoints hold it.
                weights = rounded_stream(weights, dtype, step=engine.lr_scheduler.last_epoch)
            closed |= config.send_weight_manifest
        return self.closed(weights) if closed else weights

    def closed(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return a weight stream closed by a manifest."""
        return send_with_manifest(weights, self._reports.new_address())

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of what was sent since the last call."""
        report = self._reports.take()
        return ({} if report is None else report.metrics()) | self._grid.take()


def merged_lora(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with LoRA merged, as verl does, without its rounding to BF16."""
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name, offload_fsdp_model_to_cpu
    from verl.utils.model import convert_weight_keys

    device = get_device_id()
    try:
        # Open until the last tensor has been taken: on leaving, the base weights are put back in place.
        with merged_lora_context(engine.module, backup_adapters=True):
            wrapped = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
            merged = convert_weight_keys(normalize_peft_param_name(engine.module.state_dict()), wrapped)
            for name, weight in merged.items():
                if isinstance(weight, DTensor):
                    weight = weight.to(device, non_blocking=True).full_tensor()  # type: ignore[attr-defined]
                yield name, weight.detach().clone()  # on one rank the whole is the live storage
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(engine.module)


def write_export_dtype(folder: str, dtype: str) -> None:
    """Say in an exported model's config.json which dtype it was trained to be used in.

    verl writes the dtype of the model the run started from, BF16 for most: who loads the export by its config would
    round the weights to it. The weights themselves are exported in FP32. Nothing is done without a config.json.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)  # the older name
    settings["dtype"] = dtype
    write_file(path, json.dumps(settings, indent=2) + "\n", replace=True)
