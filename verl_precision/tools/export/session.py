"""One export: each weight is rounded once, and transformers writes the folder, which appears whole or not at all."""

import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import Template
from torch import Tensor

from verl_precision.base.dtypes import DTYPES, long, torch_dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.integration.engine.weight_export import write_export_dtype
from verl_precision.integration.trainer.run_identity import run_in
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.mismatch import metric_names as names
from verl_precision.tools.export.shards import SavedModel

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
            _untie(folder / "config.json")
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
            setting="--dtype",
            value=str(dtype).removeprefix("torch."),
            allowed="a dtype that can represent every weight",
            remedy="Export in bf16 or fp32. If a weight is infinite or NaN already, use an earlier checkpoint.",
        )
    return rounded


def _untie(path: Path) -> None:
    settings = json.loads(path.read_text())
    for described in (settings, settings.get("text_config")):
        if described:
            described["tie_word_embeddings"] = False
    path.write_text(json.dumps(settings, indent=2) + "\n")


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
        name=checkpoint.parent.name,
        step=checkpoint.name.removeprefix("global_step_"),
        base=base if base.count("/") == 1 and not Path(base).exists() else "",  # a name on the hub
        trained_in=settings.get("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"),
        sampled_in=settings.get("actor_rollout_ref.rollout.dtype"),
        loss=settings.get("actor_rollout_ref.actor.policy_loss.loss_mode"),
        k3="not recorded" if k3 is None else f"{k3:.3g} nats per token",
        reward=metrics.get("critic/score/mean"),
        dtype=dtype,
        dtype_name=long(dtype),
        versions=", ".join(f"{package} {version}" for package, version in installed_versions().items()),
    )
