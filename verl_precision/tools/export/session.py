"""One export: each weight is rounded once, and transformers writes the folder, which appears whole or not at all.

verl's FSDP engines write `model_world_size_W_rank_R.pt` on each rank: a state dict of DTensors, each of which knows its
mesh and its placements. The files are mapped, not read, so that memory holds only the current tensor. They are loaded
with `weights_only=True`: nothing in them is executed.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import Template
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from verl_precision.base.dtypes import DTYPES, long, torch_dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder, open_regular
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.integration.engine import weight_export
from verl_precision.integration.engine.weight_export import OF_ADAPTER, Source, write_export_dtype
from verl_precision.integration.trainer.run_identity import run_in
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.mismatch import metric_names as names


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
        found = weight_export.sources(names, self._layers(names))
        if rest := weight_export.unmerged(found):
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
        return weight_export.layers_without_weights(adapted)

    @cached_property
    def untied(self) -> bool:
        """Whether a tensor differs from the tensor to which the config ties it."""
        unlike = weight_export.untied(self._all_sources, self._tied, lambda *two: torch.equal(*map(self._whole, two)))
        return bool(unlike)

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
        problem, setting="CHECKPOINT", value=str(folder),
        allowed="a folder checkpoints/.../global_step_N that verl's FSDP engine wrote, with every file in it",
        remedy=remedy,
    )  # fmt: skip


FILE_BYTES = 2 * 10**9  # most bytes of one file
# verl writes these files if the checkpoint's contents include `hf_model`.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def export_checkpoint(
    checkpoint: Path, dtype: str, output: Path, track: Callable[[list], Iterable] = iter
) -> list[str]:
    """Write the actor of a verl checkpoint, `global_step_N` or its `actor`, as a Hugging Face folder.

    Each weight is rounded once, from the saved dtype. The names of the tensors are returned; `track` yields them, and
    may show progress.
    """
    if dtype not in DTYPES:
        raise ConfigurationError("there is no such dtype", setting="--dtype", value=dtype, allowed=", ".join(DTYPES))
    if output.exists():
        remedy = "Name a new folder."
        raise ConfigurationError("it exists; nothing was written", setting="--output", value=output, remedy=remedy)
    saved = SavedModel.find(checkpoint)
    exported = list(saved.sources)
    weights = {name: _rounded(name, saved.tensor(name), torch_dtype(dtype)) for name in track(exported)}
    with new_folder(output) as folder:
        saved.skeleton().save_pretrained(folder, state_dict=weights, max_shard_size=FILE_BYTES)
        # transformers' other files of the model are those that verl saved, with the dtype of the exported weights.
        without = shutil.ignore_patterns(*WEIGHT_FILES)
        shutil.copytree(saved.folder / "huggingface", folder, dirs_exist_ok=True, ignore=without)
        write_export_dtype(str(folder), long(dtype))
        if saved.untied:
            settings = json.loads((folder / "config.json").read_text())
            for described in filter(None, (settings, settings.get("text_config"))):
                described["tie_word_embeddings"] = False
            (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        for file in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", file)  # safetensors lets only the owner read it
        step = saved.folder.parent if saved.folder.name == "actor" else saved.folder
        (folder / "README.md").write_text(model_card(step, dtype))
    return exported


def _rounded(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = weight.to(dtype if weight.is_floating_point() else weight.dtype, copy=True)  # a copy with its own storage
    if lost := int((~rounded.isfinite()).sum()):
        raise ConfigurationError(
            f"{name} ({lost} of {weight.numel()}): weights that are not finite in this dtype; nothing was written",
            setting="--dtype", value=str(dtype).removeprefix("torch."),
            allowed="a dtype that can represent every weight",
            remedy="Export in bf16 or fp32. If a weight is infinite or NaN already, use an earlier checkpoint.",
        )  # fmt: skip
    return rounded


def model_card(checkpoint: Path, dtype: str) -> str:
    """Return the card of a `global_step_N` in a dtype.

    Facts that the folder does not have (a run without this package's trainer) are left out; k3 is "not recorded".
    """
    run = run_in(checkpoint.parent)
    settings: dict[str, Any] = dict(run.settings) if run is not None else {}
    numbers = partial(checked, dict[str, float])
    metrics = read_state(checkpoint / STEP_METRICS, numbers, "Remove it; the card then omits its figures.") or {}
    k3, base = metrics.get(names.K3_KL), str(settings.get("actor_rollout_ref.model.path", ""))
    text = Path(__file__).with_name("card.txt").read_text(encoding="utf-8")
    return Template(text, keep_trailing_newline=True).render(
        name=checkpoint.parent.name, step=checkpoint.name.removeprefix("global_step_"),
        base=base if base.count("/") == 1 and not Path(base).exists() else "",  # a name on the hub
        trained_in=settings.get("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"),
        sampled_in=settings.get("actor_rollout_ref.rollout.dtype"),
        loss=settings.get("actor_rollout_ref.actor.policy_loss.loss_mode"),
        k3="not recorded" if k3 is None else f"{k3:.3g} nats per token",
        reward=metrics.get("critic/score/mean"), dtype=dtype, dtype_name=long(dtype),
        versions=", ".join(f"{package} {version}" for package, version in installed_versions().items()),
    )  # fmt: skip
