"""Load weights again into a vLLM model whose CPU kernels have repacked them.

After its first load, vLLM on a CPU keeps linear weights only in the kernel's layout, so loading again fails. vLLM's own
layer-wise reload restores each layer's parameters, loads and repacks. It leaves out two kinds of layers, which are
repacked here: those that borrow another layer's parameter (tied output head), and experts, which vLLM packs only while
it builds their kernel.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

from verl_precision.base.errors import WeightSyncError
from verl_precision.weight_sync.verify import LayerRecord, forget_expert_kernel, pack, shared_parameter_layers


@contextlib.contextmanager
def layerwise_reload(model: nn.Module, model_config: object, layers: set[str]) -> Iterator[dict[str, LayerRecord]]:
    """Make `load_weights` of a model that has been loaded once work inside the block; repack everything when it ends.

    Tensors are read until the block ends. Yields what each of the named layers was sent, filled while loading.
    """
    from vllm.model_executor.model_loader import reload

    if _under_way(model):
        raise WeightSyncError(
            f"{type(model).__name__}: a layer-wise reload of it has begun and not ended: its layers hold no weights, "
            "since an earlier weight sync failed (its error is above), or another package reloads around this one",
            allowed="one reload at a time, begun by this sync or inside it",
            remedy="Start the run again; if it comes back, report it with what `verl-precision check` shows.",
        )
    for layer in model.modules():
        forget_expert_kernel(layer)
    reload.initialize_layerwise_reload(model)
    yield {name: _record(model.get_submodule(name)) for name in layers}
    if _under_way(model):  # else verl has ended it: verl#7987 reloads in the same way, inside our sync
        reload.finalize_layerwise_reload(model, model_config)
    for _, layer in shared_parameter_layers(model):
        pack(layer)


def _under_way(model: nn.Module) -> bool:
    """Return whether vLLM has put parameters aside to load them again, and not put them back yet."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return any(get_layerwise_info(layer).can_load() for layer in model.modules())


def _record(layer: nn.Module) -> LayerRecord:
    """Return the list in which vLLM buffers this layer's loader calls, and the parameters, now on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

    template = dict(layer.named_parameters(recurse=False))
    loaders = {name: _get_original_loader(parameter) for name, parameter in template.items()}
    return LayerRecord(template, loaders, get_layerwise_info(layer).loaded_weights)
