"""An engine's build: which steps a setting asks for, what they leave in the engine, and one that is not installed."""

import contextlib
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import verl.workers.engine  # noqa: F401 - it imports what is tested here
from torch import nn
from verl.workers.config import FSDPEngineConfig

from verl_precision.base import extensions
from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.arithmetic_choice import VARIABLE
from verl_precision.integration.engine import build
from verl_precision.integration.engine.build import EnginePart
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.engine.fsdp_engine import precision_variant

MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
OPTIONAL = {"learning_rate_ess_base": 0.5, "stochastic_rounding_to": "bf16"}


class Verls:
    """The methods of verl's engine that a build and an update need."""

    __module__ = "builtins"  # for tests/integration/test_ledger.py this is no host

    def __init__(self, model_config, engine_config) -> None:
        self.engine_config, self.lr_scheduler = engine_config, SimpleNamespace(last_epoch=0)
        self.model_config = SimpleNamespace(lora={}, target_modules=None)
        self.module = self._build_fsdp_module(nn.Linear(2, 2))

    def _build_fsdp_module(self, module):
        self.scaler = None
        return nn.Sequential(module)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def train_batch(self, data, loss_function):
        self.optimizer_step()
        return {"metrics": {"loss": loss_function(data)}}

    def optimizer_step(self) -> float:
        return 1.0

    def get_per_tensor_param(self):
        return iter([("a", torch.tensor([1.0]))]), None


ENGINE = precision_variant(Verls, "Engine")


def made(**settings):
    return ENGINE(None, PrecisionFSDPConfig(dtype="bfloat16", mixed_precision=MIXED, **settings))


def names(engine) -> list[str]:
    return [step.__name__ for step in build.optional_steps(engine)]


def test_a_step_is_built_in_where_its_setting_asks_for_it(monkeypatch):
    assert names(made()) == [] and names(made(forward_only=True, **OPTIONAL)) == []
    assert names(made(**OPTIONAL)) == ["scale_learning_rate", "round_what_is_sent"]
    plain, reference = ENGINE(None, FSDPEngineConfig()), made(forward_only=True)
    monkeypatch.setenv(VARIABLE, "rounded_once")
    assert names(plain) == names(reference) == ["round_operations_once"], "asked of the process"


@pytest.mark.parametrize(("asked", "setting"), [*((name, name) for name in OPTIONAL), (None, "arithmetic")])
def test_a_step_that_is_not_installed_is_refused_and_never_left_out(monkeypatch, asked, setting):
    monkeypatch.setattr(extensions, "installed", lambda group: ())
    if asked is None:
        monkeypatch.setenv(VARIABLE, "exact")
    with pytest.raises(ConfigurationError, match="not installed") as error:
        made(**({asked: OPTIONAL[asked]} if asked else {}))
    assert error.value.setting == setting


def test_what_a_step_of_somebody_else_leaves_takes_part(monkeypatch):
    """As in CONTRIBUTING.md: an entry point below a setting of the engine."""
    seen = []

    def step(engine, module):
        seen.append(type(module).__name__)

        @contextlib.contextmanager
        def around_step(engine):
            seen.append("before")
            yield
            seen.append("after")

        places = {"watched": lambda data, loss: lambda data: loss(data) + 1, "take_metrics": lambda: {"mine": 3.0}}
        places |= {"sent": lambda weights: ((name, 2 * weight) for name, weight in weights)}
        engine.parts.append(EnginePart(**places, around_step=around_step))
        return module

    point = metadata.EntryPoint("watch_routing", "mine:step", "verl_precision.engine")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: step)
    monkeypatch.setattr(extensions, "installed", lambda group: [point])
    monkeypatch.setattr(build.RouterReplay, "is_asked", lambda config: False)
    engine = made(watch_routing=True)
    assert isinstance(engine.module, nn.Sequential), "verl's own is a step, too"
    metrics = engine.train_batch({}, lambda data: 4)["metrics"]
    assert metrics["loss"] == 5 and metrics["mine"] == [3.0] and metrics["precision/skipped_steps"] == [0.0]
    assert seen == ["Linear", "before", "after"], "the model is not sharded yet"
    assert dict(engine.get_per_tensor_param()[0])["a"] == 2
