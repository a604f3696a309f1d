"""Under Megatron an overflow costs an update and not the run: our part on verl's own step, without Megatron."""

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import verl
import verl.workers.engine  # noqa: F401 - it imports what is tested here
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

from verl_precision.base.errors import LossScaleError
from verl_precision.integration.engine.build import by_config
from verl_precision.integration.engine.engine_config import PrecisionMcoreConfig
from verl_precision.integration.engine.megatron_engine import STOP_AFTER, PrecisionMegatronEngine
from verl_precision.integration.ledger import LEDGER
from verl_precision.weight_sync.manifest import MANIFEST_NAME

TEXT = (Path(verl.__file__).parent / "workers/engine/megatron/transformer_impl.py").read_text()
STEP = next(node for node in ast.walk(ast.parse(TEXT)) if getattr(node, "name", "") == "optimizer_step")


class Verls:
    """What our part needs of verl's engine, and an optimizer that answers as megatron-core 0.16.1's does."""

    __module__ = "builtins"  # for tests/integration/test_ledger.py this is no host
    exec(ast.unparse(STEP))  # verl's own

    def __init__(self, model_config, engine_config, optimizer_config) -> None:
        self.engine_config, self.optimizer_config = engine_config, optimizer_config
        self.scale, self.updated = 1024.0, True
        self.optimizer = self._build_optimizer()

    def _build_optimizer(self):
        return SimpleNamespace(step=self.step, get_loss_scale=lambda: self.scale, param_groups=[{"lr": 1e-3}])

    def step(self):
        self.scale = self.scale if self.updated else max(self.scale / 2, 256.0)
        return (True, 2.0, 0) if self.updated else (False, None, None)

    def train_batch(self, data, loss_function):
        return {"metrics": {"grad_norm": self.optimizer_step()}}

    def lr_scheduler_step(self) -> float:
        return 1e-4

    def get_per_tensor_param(self):
        return iter([("a", torch.ones(2))]), None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True


ENGINE = by_config(Verls, "Engine", PrecisionMcoreConfig, PrecisionMegatronEngine)
SCALING = McoreOptimizerConfig(lr=1e-3, override_optimizer_config={"min_loss_scale": 256.0})


@pytest.fixture
def engine():
    return ENGINE(None, PrecisionMcoreConfig(dtype="float16", send_weight_manifest=True), SCALING)


def updated(engine, updated: bool) -> dict:
    engine.updated = updated
    return engine.train_batch({}, None)["metrics"]


def test_an_overflow_is_counted_and_the_schedule_waits(engine):
    metrics = updated(engine, False)
    assert metrics == {"precision/skipped_steps": [1.0], "precision/loss_scale": [512.0]}, "no norm"
    assert engine.lr_scheduler_step() == 1e-3
    metrics = updated(engine, True)
    assert metrics["precision/skipped_steps"] == [0.0] and metrics["grad_norm"] == 2.0
    assert engine.lr_scheduler_step() == 1e-4


def test_it_stops_where_the_scale_can_fall_no_further(engine):
    """After two updates that lower the scale to its minimum; one that is applied begins the count anew."""
    for applied in (False, False, *[False] * (STOP_AFTER - 1), True, *[False] * (STOP_AFTER - 1)):
        updated(engine, applied)
    with pytest.raises(LossScaleError, match="smallest loss scale, 256.*min_loss_scale"):
        updated(engine, False)


def test_with_verls_config_it_is_verls(engine):
    verls = ENGINE(None, McoreEngineConfig(dtype="float16"), SCALING)
    assert updated(verls, True) == {"grad_norm": 2.0} and math.isfinite(verls.scale)
    with pytest.raises(NotImplementedError):
        updated(verls, False)


def test_the_weight_stream_ends_with_its_digests(engine):
    assert [name for name, _ in engine.get_per_tensor_param()[0]][-1] == MANIFEST_NAME


def test_what_is_overridden_has_an_entry():
    """The form of verl's methods is read as text; without Megatron its module cannot be imported."""
    assert importlib.util.find_spec("megatron") is None
    entries = [entry for entry in LEDGER if entry.module.startswith("verl.workers.engine.megatron.")]
    overridden = {entry.name.rpartition(".")[2] for entry in entries if entry.kind == "overridden"}
    assert overridden and overridden <= {name for each in PrecisionMegatronEngine.__mro__[:-1] for name in vars(each)}
