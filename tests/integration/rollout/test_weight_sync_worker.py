"""What fails before a sync's first bucket is said once the sender has been answered: it would wait for ever."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as upstream

from verl_precision.base.errors import WeightSyncError
from verl_precision.integration.rollout import weight_sync_worker
from verl_precision.integration.rollout.sync_under_way import Sync
from verl_precision.integration.rollout.weight_sync_worker import VerifiedWeightSyncExtension

OWN = VerifiedWeightSyncExtension
CALLED = (
    *((OWN, "_old_encoder_outputs"), (OWN, "_is_quantised"), (OWN, "_recording"), (OWN, "_arrival_problems")),
    *((OWN, "_delivery_problems"), (OWN, "_layer_problems"), (Sync, "collect_loaded")),
    *((weight_sync_worker, "choose_layers"), (Sync, "coverage_problems")),
)


@pytest.fixture
def worker(monkeypatch) -> tuple[VerifiedWeightSyncExtension, MagicMock]:
    """An extension after its first sync, on a model of one layer, and verl's part, which answers the sender."""
    answered = MagicMock()
    monkeypatch.setattr(upstream, "update_weights_from_ipc", answered)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32), lora_config=None)
    model = torch.nn.Linear(2, 2)
    model.load_weights = set
    monkeypatch.setattr(OWN, "_is_quantised", lambda self: False)
    extension = object.__new__(OWN)
    extension.device, extension._sync_index = None, 1
    extension.model_runner = SimpleNamespace(model=model, vllm_config=config, encoder_cache={})
    return extension, answered


@pytest.mark.parametrize(("place", "name"), CALLED, ids=[name for _, name in CALLED])
def test_whatever_the_hook_calls_may_raise_and_the_sender_is_answered_first(worker, monkeypatch, place, name):
    def planted(*arguments, **named):
        raise KeyError("planted")

    extension, answered = worker
    monkeypatch.setattr(place, name, planted)
    with pytest.raises((WeightSyncError, KeyError), match="planted"):
        extension.update_weights_from_ipc()
    answered.assert_called_once()
    assert extension._sync is None and extension._sync_index == 1
