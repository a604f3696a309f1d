"""What the ranks of a verl run saved, as whole tensors in the dtype of the checkpoint, one at a time.

verl's FSDP engines write `model_world_size_W_rank_R.pt` on each rank: a state dict of DTensors, each of which knows its
mesh and its placements. The files are mapped, not read, so that memory holds the tensor in hand only. They are loaded
with `weights_only=True`: nothing in them is executed.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import open_regular

PEFT_PREFIX = "base_model.model."
# LoRA of a matrix: base + alpha/r B A. Other kinds of adapters have other names.
ADAPTER = re.compile(r"(.*)\.lora_([AB])\.default\.weight")


@dataclass(frozen=True)
class SavedModel:
    """The actor's weights in a checkpoint; one that cannot be exported is refused with its reason."""

    folder: Path  # the one with the shards
    world_size: int  # ranks that saved

    @classmethod
    def find(cls, checkpoint: Path) -> "SavedModel":
        """Return the model in a `global_step_N` folder, or in its `actor` folder."""
        folder = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
        described = folder / "fsdp_config.json"
        if not described.is_file() or not (folder / "huggingface" / "config.json").is_file():
            problem = "no FSDP checkpoint of verl's is there: it has fsdp_config.json and huggingface/"
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
            except Exception as error:  # torch has many, and its words offer to run what is in the file
                problem = f"{self.file(rank).name} is not whole, or holds something else than tensors by name"
                raise _refused(self.folder, problem) from error
        return loaded

    @cached_property
    def _adapters(self) -> dict[str, dict[str, str]]:
        """Module -> "A" and "B" -> name of its matrix."""
        found: dict[str, dict[str, str]] = {}
        for name in self._ranks[0]:
            if adapter := ADAPTER.fullmatch(name):
                found.setdefault(adapter[1], {})[adapter[2]] = name
            elif "lora_" in name or ".modules_to_save." in name:
                raise _refused(self.folder, f"{name} belongs to an adapter of a kind that cannot be merged")
        return found

    @cached_property
    def _adapter_scale(self) -> float:
        """Return alpha; r is a side of the matrices."""
        path = self.folder / "lora_train_meta.json"
        alpha = json.loads(path.read_text()).get("lora_alpha") if path.is_file() else None
        if not alpha:
            raise _refused(self.folder, "the checkpoint has a LoRA adapter, and lora_train_meta.json has no lora_alpha")
        return float(alpha)

    @cached_property
    def sources(self) -> dict[str, str]:
        """Name of each tensor of the model -> its name in the shards. Of tied tensors only the first is there."""
        found, storages = {}, set()
        for name, saved in self._ranks[0].items():
            if ADAPTER.fullmatch(name):
                continue
            piece = _local(saved)
            place = (piece.data_ptr(), piece.shape)
            if piece.numel() and place in storages:
                continue
            storages.add(place)
            found[name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")] = name
        for module in self._adapters:
            if f"{module}.base_layer.weight" not in self._ranks[0]:
                problem = f"only the LoRA adapter was saved, not the weights of {module}"
                remedy = "Train with checkpoint.save_lora_only=False, so that checkpoints hold both."
                raise _refused(self.folder, problem, remedy)
        return found

    def shape_and_dtype(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return shape and saved dtype of a tensor of the model."""
        saved = self._ranks[0][self.sources[name]]
        return saved.shape, saved.dtype

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model (a key of `sources`), whole, in the dtype that was saved."""
        source = self.sources[name]
        whole, adapter = self._whole(source), self._adapters.get(source.removesuffix(".base_layer.weight"))
        if adapter is None:
            return whole
        a, b = (self._whole(adapter[side]).float() for side in "AB")
        return whole.float() + self._adapter_scale / a.shape[0] * (b @ a)

    def _whole(self, source: str) -> Tensor:
        first = self._ranks[0][source]
        if not isinstance(first, DTensor):
            return first  # a buffer, the same on every rank
        ranks, sharded = first.device_mesh.mesh, []
        for dim in reversed(range(len(first.placements))):
            placement = first.placements[dim]
            if isinstance(placement, Shard):
                sharded.append(placement.dim)
            elif placement.is_replicate():
                ranks = ranks.select(dim, 0)  # the first replica stands for all
            else:
                raise _refused(self.folder, f"{source} is placed as {placement}")
        if len(sharded) > 1:
            raise _refused(self.folder, f"{source} is sharded over {len(sharded)} dimensions of the mesh")
        pieces = [_local(self._ranks[rank][source]) for rank in ranks.flatten().tolist()]
        whole = torch.cat(pieces, sharded[0]) if sharded else pieces[0]
        if whole.shape != first.shape:
            raise _refused(self.folder, f"{source} has shape {tuple(whole.shape)}, not {tuple(first.shape)}")
        return whole


def _local(saved: Tensor) -> Tensor:
    return saved.to_local() if isinstance(saved, DTensor) else saved


def _refused(folder: Path, problem: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError(
        problem,
        setting="CHECKPOINT",
        value=str(folder),
        allowed="a folder checkpoints/.../global_step_N that verl's FSDP engine wrote, with every file in it",
        remedy=remedy,
    )
