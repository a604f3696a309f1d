"""Part A: updates and overflows of verl's FSDP engine with ours on top, on one device."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_precision.base.dtypes import long
from verl_precision.base.errors import require
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.tools.selftest.checks import NO_FSDP1, Figures, check
from verl_precision.tools.tiny_model import cached_tiny_model

_UPDATES, _SAVED_AFTER = 50, 25
_GROWTH_INTERVAL, _FIRST_SCALE = 8, 1024.0
_PLANTED = {3, 4, 17, 30, 41}  # two in a row; before and after the checkpoint


@check("fp16_updates", "A", "50 FP16 updates: overflows skipped, scale exact, resumed")
def fp16_updates(device: str, folder: Path, strategy: str = "fsdp2") -> Figures:
    """Train 50 updates in FP16, with planted overflows and a restart."""
    from verl_precision.tools.selftest.single_rank import one_rank

    settings = LossScaleSettings(initial=_FIRST_SCALE, growth_interval=_GROWTH_INTERVAL)
    build = partial(build_engine, device, "fp16", strategy, loss_scale=settings)
    with one_rank(device):
        engines = [build()]
        exact, found = _gradient(build_engine(device, "fp32", strategy)), _gradient(engines[0])
        error = float((found - exact).norm() / exact.norm())
        require(error < 4e-3, f"gradients in FP16 are off by {error:.1e} of FP32's; FP16 makes 1.4e-3, BF16 8e-3")
        scale, healthy, skipped = _FIRST_SCALE, 1, 0  # the gradient above was a healthy update of the scaler
        for number in range(_UPDATES):
            if number == _SAVED_AFTER:
                engines[0].save_checkpoint(str(folder / "checkpoint"), global_step=number)
                engines.append(build())
                engines[1].load_checkpoint(str(folder / "checkpoint"))
            before = _weights(engines[0])
            for engine in engines:
                update(engine, planted=number in _PLANTED)
            unchanged = torch.equal(_weights(engines[0]), before)
            skipped += unchanged
            if number in _PLANTED:
                scale, healthy = scale / 2, 0
                require(unchanged, f"update {number} overflowed and changed weights")
            else:
                healthy += 1
                if healthy == _GROWTH_INTERVAL:
                    scale, healthy = scale * 2, 0
                require(not unchanged, f"update {number} was healthy and did nothing")
            for name, engine in zip(("engine", "resumed engine"), engines, strict=False):
                got = engine.scaler.get_scale()
                require(got == scale, f"after update {number} the {name}'s loss scale is {got:g}, not {scale:g}")
        unbroken, resumed = map(_weights, engines)
        apart = float((unbroken - resumed).abs().max() / unbroken.abs().max())
        require(apart < 1e-3, f"after a resume the weights are {apart:.1e} of the largest away from an unbroken run")
    return {"skipped": skipped, "gradient_error": error, "resumed_apart": apart, "last_scale": scale}


check("fp16_updates_fsdp1", "A", "the same under FSDP1", needs_gpu=NO_FSDP1)(partial(fp16_updates, strategy="fsdp"))


def build_engine(device: str, dtype: str, strategy: str = "fsdp2", **ours: Any) -> Any:
    """Build verl's engine around a tiny model. What else is ours in its config: fields of `PrecisionFSDPConfig`."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig

    if device == "cpu":
        torch.set_num_threads(1)  # the model is tiny
    model = HFModelConfig(
        path=str(cached_tiny_model("qwen3")), use_remove_padding=True, enable_gradient_checkpointing=True,
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    model.model_type = "language_model"
    dtypes = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = PrecisionFSDPConfig(
        strategy=strategy, fsdp_size=-1, use_torch_compile=False, dtype=long(dtype), mixed_precision=dtypes, **ours
    )
    engine = EngineRegistry.get_engine_cls("language_model", strategy)(
        model_config=model,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, lr_scheduler_type="constant", total_training_steps=1000),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra"]),
    )
    engine.initialize()
    return engine


def batch() -> Any:
    """Return three sequences of different lengths, the same ones each time."""
    from verl_precision.tools.selftest.single_rank import engine_batch

    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 90, (length,), generator=generator) for length in (12, 20, 7)]
    switches = {"use_remove_padding": True, "calculate_entropy": True, "update_lr_scheduler": True}
    return engine_batch(sequences, max_token_len_per_gpu=32, **switches)


def _loss(model_output: Any, data: Any, dp_group: Any, planted: bool) -> tuple[Tensor, dict[str, Any]]:
    return -model_output["log_probs"].values().float().mean() * (float("inf") if planted else 1.0), {}


def update(engine: Any, planted: bool = False) -> None:
    """Do one update, with an infinite loss if an overflow is planted."""
    with engine.train_mode():
        engine.train_batch(batch(), partial(_loss, planted=planted))


def _gradient(engine: Any) -> Tensor:
    """Return the unscaled gradient; a scaler counts it as a healthy update."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(), partial(_loss, planted=False))
        if engine.scaler is not None:
            engine.scaler.unscale_(engine.optimizer)
            engine.scaler.update()
        found = _joined(p.grad for p in engine.module.parameters())
        engine.optimizer_zero_grad()
    return found


def _weights(engine: Any) -> Tensor:
    return _joined(p.detach() for p in engine.module.parameters())


def _joined(tensors: Iterable[Any]) -> Tensor:
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in tensors)
    return torch.cat([each.flatten().double().cpu() for each in whole])
