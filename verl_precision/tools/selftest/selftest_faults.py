"""Faults that `verl-precision selftest` injects into the rollout of its own short run; the run must stop."""

from torch import Tensor

from verl_precision.integration.rollout.weight_sync_worker import VerifiedWeightSyncExtension
from verl_precision.weight_sync.manifest import MANIFEST_NAME, bit_view


class FlippedBit(VerifiedWeightSyncExtension):
    """The worker extension, with one bit flipped in the first tensor that arrives."""

    _planted = False

    def _update_weights(self, weights: list[tuple[str, Tensor]], peft_config: dict, base_sync_done: bool) -> None:
        victims = [i for i, (name, tensor) in enumerate(weights) if name != MANIFEST_NAME and tensor.numel()]
        if victims and not self._planted:
            self._planted, first = True, victims[0]
            weights = [*weights[:first], *self._damaged(*weights[first]), *weights[first + 1 :]]
        super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)

    def _damaged(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        tensor = tensor.clone()
        bit_view(tensor)[0] ^= 1
        return [(name, tensor)]


class LostTensor(FlippedBit):
    """The worker extension, without the first tensor that arrives."""

    def _damaged(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return []
