"""Chooses the engine of a config and builds it in a list of steps, `module = step(engine, module)`.

A step can add an `EnginePart`, which then acts in each update or weight stream. A step that most runs do not need is an
entry point (base/extensions.py) of the group `verl_precision.engine`, named after the engine's setting that turns the
step on: `optional_steps`. The steps build the model of an actor, a critic or a reference, and the shadow of an actor.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_precision.base.dtypes import long, short, torch_dtype
from verl_precision.base.extensions import features_asked_for
from verl_precision.engine.arithmetic_choice import SETTING as ARITHMETIC
from verl_precision.engine.arithmetic_choice import arithmetic_in_use, inner_dtype
from verl_precision.engine.forward_dtypes import ForwardDtypes, compute_head_in_fp32
from verl_precision.engine.loss_scaling import LossScaler, StepReport
from verl_precision.engine.settings import ShadowSettings
from verl_precision.engine.shadow import ShadowModel
from verl_precision.integration.engine.router_replay import RouterReplay
from verl_precision.integration.engine.weight_export import adapter_layers
from verl_precision.integration.ledger import already_registered
from verl_precision.weight_sync.bf16_grid import Bf16Grid
from verl_precision.weight_sync.manifest import Weights, send_with_manifest
from verl_precision.weight_sync.report import ReportBox

Step = Callable[[Any, nn.Module], nn.Module]

# (device, vendor): verl prefers such a key to its own keys, which name only the device, so no key is replaced.
NVIDIA, CPU = ("cuda", "nvidia"), ("cpu", "cpu")
PROMISED = (ARITHMETIC, "learning_rate_ess_base", "stochastic_rounding_to")


class _ByConfig:
    config_type: type
    precise: type

    def __new__(cls, model_config: Any = None, engine_config: Any = None, *args: object, **kwargs: object) -> Any:
        ours = isinstance(engine_config, cls.config_type) and issubclass(cls.precise, cls)
        return object.__new__(cls.precise if ours else cls)


def by_config(base: type, name: str, config_type: type, ours: type, *verls: type) -> type:
    """Return a subclass of a verl engine with the mixins `verls`; with a config of our type it has `ours` too."""
    about = {"__module__": ours.__module__, "__doc__": f"{base.__name__}; see {ours.__module__}."}
    engine: Any = type(name, (*verls, _ByConfig, base), {**about, "config_type": config_type})
    engine.precise = type(name, (ours, engine), about)
    return engine


def register_engines(engines: Iterable[type], backends: Iterable[str], key: tuple[str, str]) -> None:
    """Register an engine of log-probs and one of values with verl under a (device, vendor) key, once.

    A key that another package owns is refused.
    """
    from verl.workers.engine.base import EngineRegistry  # its import ends with our own registration

    for model_type, engine in zip(("language_model", "value_model"), engines, strict=True):
        for backend in backends:
            owner = EngineRegistry._engines.get(model_type, {}).get(backend, {}).get(key)
            if owner is not None and owner.__module__ != engine.__module__:
                raise already_registered(f"verl engine {model_type}/{backend} for (device, vendor) {key}", owner)
            if owner is None:
                EngineRegistry.register(model_type=model_type, backend=backend, device=key[0], vendor=key[1])(engine)


@dataclass(frozen=True)
class EnginePart:
    """Hooks into an engine after its build; missing hooks do nothing."""

    # (data, verl's loss function) -> the loss function of the update whose batch is `data`
    watched: Callable[[Any, Callable], Callable] = lambda data, loss_function: loss_function
    # engine -> a context manager around the optimizer's step
    around_step: Callable[[Any], AbstractContextManager[None]] = lambda engine: nullcontext()
    # the weight stream to the rollout, as the parts before return it -> the stream
    sent: Callable[[Weights], Weights] = lambda weights: weights
    take_metrics: Callable[[], Mapping[str, float]] = dict  # of the training step that ends


class PartsOfEngine:
    """A mixin that comes before an engine of verl. It calls the engine's parts, and reports each training step once."""

    parts: list[EnginePart] = []
    report: StepReport | None = None
    scaler: Any = None

    def train_batch(self, data, loss_function):
        """Train on a mini-batch as verl does; add the step's metrics to the step's last mini-batch."""
        for part in self.parts:
            loss_function = part.watched(data, loss_function)
        outputs = super().train_batch(data, loss_function)
        if (self.parts or self.report) and self.is_mp_src_rank_with_outputs():
            if self.report is not None and self.report.skipped[-1:] == [True]:
                outputs["metrics"].pop("grad_norm")  # verl averages it over mini-batches: one inf would hide all others
            if tu.get(data, key="update_lr_scheduler", default=True):
                # lists, because verl joins the lists of all ranks
                outputs["metrics"].update({key: [value] for key, value in self.take_metrics().items()})
        return outputs

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the training step that ends."""
        found = {} if self.report is None else self.report.metrics(self.scaler)
        for part in self.parts:
            found |= part.take_metrics()
        return found

    def get_per_tensor_param(self, *args, **kwargs):
        """Return the weight stream as the parts send it."""
        weights, peft_config = self.trained_weights(*args, **kwargs)
        for part in self.parts:
            weights = part.sent(weights)
        return weights, peft_config

    def trained_weights(self, *args, **kwargs):
        """Return verl's weight stream."""
        return super().get_per_tensor_param(*args, **kwargs)


def optional_steps(engine: Any) -> list[Step]:
    """Return the steps that settings of this process, or of an actor's config, turn on."""

    def value_of(setting: str) -> object:
        if setting == ARITHMETIC:
            return None if inner_dtype() is None else arithmetic_in_use()
        return getattr(engine.engine_config, setting, None) if engine.is_actor else None

    return features_asked_for("engine", value_of, PROMISED)


def steps_of(engine: Any) -> list[Step]:
    """Return the steps that build an engine with a config of ours."""
    if not engine.is_actor:
        return [*optional_steps(engine), *VERIFIED]
    return [watch_weights, *optional_steps(engine), keep_adapter, add_shadow, replay_routers, *VERIFIED, send_digests]


def watch_weights(engine: Any, module: nn.Module) -> nn.Module:
    """Count the trained weights on their way to the rollout, before anything rounds them."""
    grid = Bf16Grid()
    engine.parts.append(EnginePart(sent=grid.watch, take_metrics=grid.take))
    return module


def keep_adapter(engine: Any, module: nn.Module) -> nn.Module:
    """Keep the layers of a LoRA adapter, without weights; refuse one that cannot be sent to the rollout."""
    if engine.sends_weights:
        model = engine.model_config
        engine.adapter_layers = adapter_layers(module, bool(model.lora.get("merge")), model.target_modules)
    return module


def add_shadow(engine: Any, module: nn.Module) -> nn.Module:
    """Build a copy of the model by a copy of the engine, whose compute dtype is the shadow's."""
    config = engine.engine_config
    if config.shadow.enabled:
        name, twin = config.shadow.dtype, copy.copy(engine)
        mixed_precision = {**config.mixed_precision, "param_dtype": short(name)}
        twin.engine_config = replace(config, dtype=long(name), mixed_precision=mixed_precision, shadow=ShadowSettings())
        shadow = copy.deepcopy(module).eval()
        for parameter in shadow.parameters():  # not the buffers: RoPE's frequencies stay FP32, as in the rollout
            parameter.data = parameter.data.to(torch_dtype(name))
        for step in VERIFIED:
            shadow = step(twin, shadow)
        # Gradients are turned off only now: with LoRA, FSDP1 wraps by requires_grad, and must wrap the shadow alike.
        twin.module = shadow.requires_grad_(False)
        engine.shadow = ShadowModel(twin)
    return module


def replay_routers(engine: Any, module: nn.Module) -> nn.Module:
    """Make a mixture of experts replay, or compare, the rollout's choice of experts."""
    if RouterReplay.is_asked(engine.engine_config):
        engine.replay = RouterReplay(module, engine.engine_config)
    return module


def record_dtypes(engine: Any, module: nn.Module) -> nn.Module:
    """Record the dtypes of each forward; before `shard`, because FSDP1 then moves the matrices away."""
    config = engine.engine_config
    head = compute_head_in_fp32(module) if config.fp32_output_head and not engine.is_critic else None
    role = "reference" if config.forward_only else "critic" if engine.is_critic else "actor"
    engine.dtypes = ForwardDtypes(module, role, torch_dtype(config.compute_dtype), exempt=head)
    return module


def shard(engine: Any, module: nn.Module) -> nn.Module:
    """Let verl shard the model; hide a warning of verl's scaler, which `scale_loss` replaces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available")
        return engine.sharded(module)  # type: ignore[no-any-return]


def scale_loss(engine: Any, module: nn.Module) -> nn.Module:
    """Replace verl's loss scaler by ours."""
    config = engine.engine_config
    if engine.scaler is not None:
        engine.scaler = None if config.forward_only else LossScaler(config.loss_scale, get_device_name())
    return module


def send_digests(engine: Any, module: nn.Module) -> nn.Module:
    """End weight streams with a manifest if the receiver reads it; on a CPU only such a receiver can reload weights."""
    if engine.is_actor and (get_device_name() == "cpu" or engine.engine_config.get("send_weight_manifest")):
        engine.parts.append(digester())
    return module


def digester() -> EnginePart:
    """Return the part that ends weight streams with a manifest, and collects the receivers' reports."""
    reports = ReportBox()
    return EnginePart(
        sent=lambda weights: send_with_manifest(weights, reports.new_address()), take_metrics=reports.take_metrics
    )


VERIFIED: list[Step] = [record_dtypes, shard, scale_loss]
