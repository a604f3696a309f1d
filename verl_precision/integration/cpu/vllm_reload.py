"""Load weights again into a vLLM model whose CPU kernels have repacked them.

After its first load, vLLM on a CPU keeps linear weights only in the kernel's layout, so that loading again fails.
vLLM's own layer-wise reload restores each layer's parameters, loads, repacks. Three things are added:

* a layer that borrows another layer's parameter (tied output head) receives no weights of its own, so the reload leaves
  its repacked copy as it was, and the run samples from old weights without a word: such layers are repacked too;
* expert weights are packed only while their kernel is built, so that the kernel has to be built again;
* what each layer was sent is kept for `weight_sync.verify`.

verl may come to reload in the same way inside its own sync (verl#7987), which is inside ours: vLLM begins no layer
twice, and a reload that verl has ended is not ended again.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

from verl_precision.errors import WeightSyncError
from verl_precision.weight_sync.verify import (
    LayerRecord,
    forget_expert_kernel,
    post_process,
    shared_parameter_layers,
)


@contextlib.contextmanager
def layerwise_reload(model: nn.Module, model_config: object, layers: set[str]) -> Iterator[dict[str, LayerRecord]]:
    """Make `model.load_weights` work inside the block; repack everything when it ends.

    The tensors given to `load_weights` are read until the block ends: they must not be views of reused memory.

    Args:
        model: a vLLM model that has been loaded once.
        model_config: vLLM's model config.
        layers: names of the layers to record.

    Yields:
        Layer name -> what it was sent, filled while loading.

    Raises:
        WeightSyncError: if a reload of this model has begun and not ended.
    """
    from vllm.model_executor.model_loader import reload

    if _under_way(model):
        raise WeightSyncError(
            f"{type(model).__name__}: a layer-wise reload of it has begun and not ended: its layers hold no weights. "
            "Usual causes: an earlier weight sync failed (its error is above), or another package reloads around this "
            "one",
            allowed="one reload at a time, begun by this sync or inside it",
            remedy="Start the run again; if it comes back, report it with the versions shown by `verl-precision "
            "check`.",
        )
    for layer in model.modules():
        forget_expert_kernel(layer)
    reload.initialize_layerwise_reload(model)
    yield {name: _record(layer) for name, layer in model.named_modules() if name in layers}
    if _under_way(model):  # else verl has ended it
        reload.finalize_layerwise_reload(model, model_config)
    for _, layer in shared_parameter_layers(model):
        post_process(layer)


def _under_way(model: nn.Module) -> bool:
    """Tell whether vLLM has put a layer's parameters aside to load them again, and not put them back yet."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return any(get_layerwise_info(layer).can_load() for layer in model.modules())


def _record(layer: nn.Module) -> LayerRecord:
    """Hold on to the list vLLM buffers this layer's loader calls in; the parameters are on the meta device now."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

    template = dict(layer.named_parameters(recurse=False))
    return LayerRecord(
        template=template,
        loaders={name: _get_original_loader(parameter) for name, parameter in template.items()},
        calls=get_layerwise_info(layer).loaded_weights,
    )
