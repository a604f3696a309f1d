"""What this package does in each of verl's training engines that a CPU can try; as a script it prints that as JSON.

In a process of its own: Megatron's modules are empty ones here (`megatron_stand_in.py`).
"""

import functools
import json
import math
from typing import Any

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from composer import actor_config, compose_estimator
from megatron_stand_in import stand_in, verls_megatron
from test_estimators_train import PROMPT, RESPONSE, RESPONSES, as_the_driver_makes_it, make_batch
from verl.plugin.platform import set_platform
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from verl_precision.base.dtypes import long
from verl_precision.base.errors import LossScaleError
from verl_precision.engine.loss_scaling import local_part
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.integration.cpu.platform import PlatformCPU
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig, PrecisionMcoreConfig
from verl_precision.integration.engine.measurement import CANDIDATES, LOTS, MISMATCH, REQUEST, MeasureOrder
from verl_precision.integration.ledger import LEDGER
from verl_precision.tools.selftest.single_rank import nested, one_rank
from verl_precision.tools.tiny_model import cached_tiny_model
from verl_precision.weight_sync.manifest import MANIFEST_NAME

SCALE = 1024.0
OURS, VERLS, MEGATRON, VERLS_MEGATRON = "FSDP", "FSDP, verl's config", "Megatron", "Megatron, verl's config"
ENGINES = (OURS, VERLS, MEGATRON, VERLS_MEGATRON)


def make(name: str, dtype: str) -> Any:
    """Build an engine that computes a tiny Qwen3 in bf16 or fp16."""
    made: dict[str, Any] = {"checkpoint_config": CheckpointConfig()}
    options = {"attn_implementation": "sdpa"}
    model = HFModelConfig(path=str(cached_tiny_model("qwen3")), override_config=options)
    if name in (OURS, VERLS):
        mixed = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        settings = {"strategy": "fsdp2", "use_torch_compile": False, "dtype": long(dtype), "mixed_precision": mixed}
        if name == OURS:
            ours = {"loss_scale": LossScaleSettings(initial=SCALE), "send_weight_manifest": True}
            config, cls = (
                PrecisionFSDPConfig(**settings, **ours),
                EngineRegistry.get_engine_cls("language_model", "fsdp2"),
            )
        else:
            config, cls = FSDPEngineConfig(**settings), transformer_impl.FSDPEngineWithLMHead
        optimizer: Any = FSDPOptimizerConfig(lr=1e-3, total_training_steps=100, lr_scheduler_type="cosine")
    else:
        registered = EngineRegistry._engines["language_model"]["megatron"]
        ours = name == MEGATRON
        cls = stand_in(registered["cuda", "nvidia"].precise if ours else registered["cuda"])
        config = (PrecisionMcoreConfig if ours else McoreEngineConfig)(
            dtype=long(dtype), **({"send_weight_manifest": True} if ours else {})
        )
        scaling = {"initial_loss_scale": SCALE, "min_loss_scale": SCALE / 4, "hysteresis": 1, "loss_scale_window": 400}
        optimizer = McoreOptimizerConfig(lr=1e-3, override_optimizer_config=scaling)
    engine = cls(model_config=model, engine_config=config, optimizer_config=optimizer, **made)
    engine.initialize()
    return engine


def weights(engine: Any) -> torch.Tensor:
    """Return all weights of an engine in one row."""
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    return torch.cat([local_part(w).detach().flatten().float() for each in modules for w in each.parameters()])


def update(engine: Any, overflow: bool = False, **asked: Any) -> dict[str, Any]:
    """Train on one mini-batch with equation (5), as a worker does; return what the engine reports."""
    config, batch = compose_estimator("pg_seq_is"), make_batch()
    trainer = torch.full((RESPONSES, RESPONSE), -4.5)
    for key, values in as_the_driver_makes_it(config, trainer).items():
        batch[key] = nested(list(values))
    if asked:
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(batch, **asked)
        batch[LOTS] = torch.arange(RESPONSES).unsqueeze(-1)
    with pytest.MonkeyPatch.context() as patch, engine.train_mode():
        if overflow:
            patch.setattr(
                engine, "forward_backward_batch", functools.partial(_overflowing, engine.forward_backward_batch)
            )
        return engine.train_batch(batch, functools.partial(ppo_loss, actor_config(config)))["metrics"]


def _overflowing(verls: Any, *args: Any, **kwargs: Any) -> Any:
    """Do verl's pass; after the backward, a gradient has an inf."""
    outputs, engine = verls(*args, **kwargs), verls.__self__
    module = engine.module[0] if isinstance(engine.module, list) else engine.module
    local_part(next(weight for weight in module.parameters() if weight.grad is not None).grad).view(-1)[0] = math.inf
    return outputs


def learns(name: str) -> str:
    """An estimator of ours changes the weights, through verl's `ppo_loss`."""
    engine = make(name, "bf16")
    before = weights(engine)
    metrics = update(engine)
    return _yes(not torch.equal(weights(engine), before) and math.isfinite(metrics["grad_norm"]))


def measures(name: str) -> str:
    """The mismatch of a mini-batch that the trainer asks for, and the tokens that it may keep."""
    request = MeasureOrder(
        mismatch=True,
        rollout_as_shadow=True,
        bypass=True,
        clip=None,
        beta_in_ratio=True,
        ratio_threshold=3.0,
        longest_response=RESPONSE,
        keep=2,
    )
    metrics = update(make(name, "bf16"), **{REQUEST: request})
    if MISMATCH not in metrics:
        return "no"
    kept = [len(one.log_probs) for one, _ in metrics[CANDIDATES].aggregate().chosen()]
    tokens = metrics[MISMATCH].aggregate().metrics()["mismatch/tokens"]
    return _yes(tokens == RESPONSES * RESPONSE and kept == [RESPONSE] * 2)


def skips(name: str) -> str:
    """An overflow in FP16 leaves the weights as they are, is counted, lowers the scale, and the schedule waits."""
    engine = make(name, "fp16")
    before = weights(engine)
    try:
        metrics = update(engine, overflow=True)
    except NotImplementedError:
        return "the run ends"
    if not torch.equal(weights(engine), before):
        assert name == VERLS  # verl's scaler is off on every device but CUDA
        return "not on a CPU"
    if metrics.get("precision/skipped_steps") != [1]:
        return "skipped, not counted"
    rates = [engine.lr_scheduler_step()]
    again = update(engine)
    rates.append(engine.lr_scheduler_step())
    counted = metrics["precision/loss_scale"] == [SCALE / 2] and again["precision/skipped_steps"] == [0]
    waited = rates[0] == 1e-3 > rates[1]
    return _yes(counted and waited and "grad_norm" not in metrics and not torch.equal(weights(engine), before))


def stops(updates: int = 20) -> int:
    """Return how many updates Megatron skips in a row before the run stops; the scale falls twice, to its minimum."""
    engine = make(MEGATRON, "fp16")
    for number in range(1, updates + 1):
        try:
            update(engine, overflow=True)
        except LossScaleError:
            return number
    return 0


def digests(name: str) -> str:
    """The weight stream to the rollout ends with the digests of what was sent."""
    engine = make(name, "bf16")
    stream = engine.get_per_tensor_param()[0]
    return _yes(MANIFEST_NAME in [key for key, _ in stream])


def verifies(name: str) -> str:
    """The dtype that a forward computed in, FP32 log-probs, a shadow and this package's router replay."""
    return _yes(all(hasattr(make(name, "bf16").engine_config, each) for each in ("shadow", "fp32_log_probs")))


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


ROWS = {
    "losses": learns,
    "mismatch in bypass mode, and with it alarm and metrics": measures,
    "an FP16 overflow skips the update, is counted, and the schedule waits": skips,
    "digests of the weights that are sent": digests,
    "FP32 log-probs, verified dtypes, shadow, this package's router replay, stochastic rounding": verifies,
}


def every_engine() -> dict[str, dict[str, str]]:
    """Try each row in each engine; and that Megatron stops where its loss scale can fall no further."""
    set_platform(PlatformCPU())
    verls_megatron()
    from verl_precision.integration.engine.megatron_engine import STOP_AFTER, PrecisionMegatronEngine

    entries = [entry for entry in LEDGER if entry.module.startswith("verl.workers.engine.megatron.")]
    overridden = [entry.name.rpartition(".")[2] for entry in entries if entry.kind == "overridden"]
    ours = {name for each in PrecisionMegatronEngine.__mro__[:-1] for name in vars(each)}
    assert overridden and ours.issuperset(overridden)  # their form: on import
    with one_rank("cpu"):
        assert stops() == 2 + STOP_AFTER
        return {what: {name: row(name) for name in ENGINES} for what, row in ROWS.items()}


if __name__ == "__main__":
    assert PROMPT
    print(json.dumps(every_engine()))
