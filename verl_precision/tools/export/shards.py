"""Reads the files that the ranks of a verl run saved: whole tensors in the checkpoint's dtype, one at a time.

verl's FSDP engines write `model_world_size_W_rank_R.pt` on each rank: a state dict of DTensors, each of which knows its
mesh and its placements. The files are mapped, not read, so that memory holds only the current tensor. They are loaded
with `weights_only=True`: nothing in them is executed.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import open_regular
from verl_precision.integration.engine.weight_export import (
    OF_ADAPTER,
    Source,
    layers_without_weights,
    sources,
    unmerged,
    untied,
)


@dataclass(frozen=True)
class SavedModel:
    """The actor's weights in a checkpoint; a checkpoint that cannot be exported is refused with the reason."""

    folder: Path  # folder of the shards
    world_size: int  # ranks that saved

    @classmethod
    def find(cls, checkpoint: Path) -> "SavedModel":
        """Return the model in a `global_step_N` folder, or in its `actor` folder."""
        folder = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
        described = folder / "fsdp_config.json"
        if not described.is_file() or not (folder / "huggingface" / "config.json").is_file():
            problem = "there is no FSDP checkpoint of verl, which has fsdp_config.json and huggingface/"
            raise _refused(checkpoint, problem)
        with open_regular(described) as file:
            model = cls(folder, int(json.load(file)["world_size"]))
        for rank in range(max(1, model.world_size)):
            if not model.file(rank).is_file():
                raise _refused(checkpoint, f"{model.file(rank).name} is missing")
        return model

    def file(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.folder / f"model_world_size_{self.world_size}_rank_{rank}.pt"

    @cached_property
    def _ranks(self) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"map_location": "cpu", "mmap": True, "weights_only": True}
        loaded = []
        for rank in range(self.world_size):
            try:
                loaded.append(torch.load(self.file(rank), **options))
                if not all(isinstance(each, Tensor) for each in loaded[-1].values()):
                    raise TypeError("not a state dict")
            except Exception as error:  # torch raises many kinds of errors, and suggests to run the file's code
                problem = f"{self.file(rank).name} is incomplete, or is not a dictionary of named tensors"
                raise _refused(self.folder, problem) from error
        return loaded

    def skeleton(self) -> Any:
        """Return the model without weights; transformers finds the names of tensors in files by this model."""
        config = transformers.AutoConfig.from_pretrained(self.folder / "huggingface")
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None:
            problem = f"transformers has no model {config.architectures}: it brings its own code, which is not run"
            raise _refused(self.folder, problem)
        with torch.device("meta"):
            return kind(config)

    @cached_property
    def _all_sources(self) -> dict[str, Source]:
        names = list(self._ranks[0])
        if all(OF_ADAPTER.fullmatch(name) for name in names):
            problem = f"only the LoRA adapter was saved, not the weights that {names[0]} is added to"
            remedy = "Train with checkpoint.save_lora_only=False, so that checkpoints hold both."
            raise _refused(self.folder, problem, remedy)
        found = sources(names, self._layers(names))
        if rest := unmerged(found):
            raise _refused(self.folder, f"{rest[0]} belongs to an adapter of a kind that cannot be merged")
        return found

    def _layers(self, names: list[str]) -> dict[str, nn.Module]:
        """Return the layers of the adapter, if there is one, without weights, as PEFT builds them."""
        if not any((match := OF_ADAPTER.fullmatch(name)) and "lora_" in match[2] for name in names):
            return {}
        if not (self.folder / "adapter_config.json").is_file():
            problem = "the checkpoint has a LoRA adapter, but no adapter_config.json that names its modules"
            raise _refused(self.folder, problem, "Train with this package's engine; it saves that file.")
        settings: Any = LoraConfig.from_pretrained(str(self.folder))
        settings.init_lora_weights = settings.inference_mode = False
        with torch.device("meta"):
            adapted = get_peft_model(self.skeleton(), settings)
        shapes = {name: tensor.shape for name, tensor in adapted.state_dict().items()}
        for name in names:
            if OF_ADAPTER.fullmatch(name) and self._ranks[0][name].shape != shapes.get(name):
                raise _refused(self.folder, f"{name} belongs to an adapter of a kind that cannot be merged")
        return layers_without_weights(adapted)

    @cached_property
    def untied(self) -> bool:
        """Whether a tensor differs from the tensor to which the config ties it."""
        return bool(untied(self._all_sources, self._tied, lambda *names: torch.equal(*map(self._whole, names))))

    @cached_property
    def _tied(self) -> dict[str, str]:
        """The tied names of the config, each with the name of the tensor that it must equal."""
        return dict(self.skeleton().all_tied_weights_keys)

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The source of each tensor of the model; of tied tensors that are equal, only one is included."""
        found = self._all_sources
        return found if self.untied else {name: found[name] for name in found if self._tied.get(name) not in found}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model (a key of `sources`), whole, in the saved dtype, or merged in FP32."""
        return self.sources[name].value(self._whole)

    def _whole(self, source: str) -> Tensor:
        first = self._ranks[0][source]
        if not isinstance(first, DTensor):
            return first  # a buffer, the same on every rank
        ranks, sharded = first.device_mesh.mesh, None
        for dim, placement in reversed([*enumerate(first.placements)]):
            if placement.is_replicate():
                ranks = ranks.select(dim, 0)  # the first replica stands for all
            elif isinstance(placement, Shard) and sharded is None:
                sharded = placement.dim
            else:
                raise _refused(self.folder, f"{source} is placed as {first.placements}")
        pieces = [self._ranks[rank][source].to_local() for rank in ranks.flatten().tolist()]
        whole = pieces[0] if sharded is None else torch.cat(pieces, sharded)
        if whole.shape != first.shape:
            raise _refused(self.folder, f"{source} has shape {tuple(whole.shape)}, not {tuple(first.shape)}")
        return whole


def _refused(folder: Path, problem: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError(
        problem,
        setting="CHECKPOINT",
        value=str(folder),
        allowed="a folder checkpoints/.../global_step_N that verl's FSDP engine wrote, with every file in it",
        remedy=remedy,
    )
