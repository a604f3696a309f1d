"""Checks of `verl-precision selftest` that need verl's FSDP engine with ours on top, on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from verl_precision.base.dtypes import long
from verl_precision.base.errors import require
from verl_precision.base.tiny_model import cached_tiny_model
from verl_precision.engine.settings import LossScaleSettings, ShadowSettings
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.tools.selftest.checks import Figures
from verl_precision.tools.selftest.single_rank import engine_batch, one_rank

_UPDATES, _SAVED_AFTER = 50, 25
_GROWTH_INTERVAL, _FIRST_SCALE = 8, 1024.0
_PLANTED = {3, 4, 17, 30, 41}  # two in a row; before and after the checkpoint

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


def fp16_updates_fsdp1(device: str, folder: Path) -> Figures:
    """Train 50 updates in FP16 under FSDP1, with planted overflows and a restart."""
    return fp16_updates(device, folder, "fsdp")


def fp16_updates(device: str, folder: Path, strategy: str = "fsdp2") -> Figures:
    """Train 50 updates in FP16 under FSDP2, with planted overflows and a restart."""
    settings = LossScaleSettings(initial=_FIRST_SCALE, growth_interval=_GROWTH_INTERVAL)
    with one_rank(device):
        engine = _build_engine(device, "fp16", strategy, loss_scale=settings)
        exact = _gradient(_build_engine(device, "fp32", strategy))
        found = _gradient(engine)
        error = float((found - exact).norm() / exact.norm())
        require(error < 4e-3, f"gradients in FP16 are off by {error:.1e} of FP32's; FP16 makes 1.4e-3, BF16 8e-3")
        checkpoint = str(folder / "checkpoint")
        scale, healthy, skipped = _FIRST_SCALE, 1, 0  # the gradient above was a healthy update of the scaler
        resumed: Any = None
        for update in range(_UPDATES):
            if update == _SAVED_AFTER:
                engine.save_checkpoint(checkpoint, global_step=update)
                resumed = _build_engine(device, "fp16", strategy, loss_scale=settings)
                resumed.load_checkpoint(checkpoint)
            before = _weights(engine)
            for one in filter(None, (engine, resumed)):
                _update(one, planted=update in _PLANTED)
            unchanged = torch.equal(_weights(engine), before)
            skipped += unchanged
            if update in _PLANTED:
                scale, healthy = scale / 2, 0
                require(unchanged, f"update {update} overflowed and changed weights")
            else:
                healthy += 1
                if healthy == _GROWTH_INTERVAL:
                    scale, healthy = scale * 2, 0
                require(not unchanged, f"update {update} was healthy and did nothing")
            for name, one in (("engine", engine), ("resumed engine", resumed)):
                got = scale if one is None else one.scaler.get_scale()
                require(got == scale, f"after update {update} the {name}'s loss scale is {got:g}, not {scale:g}")
        apart = float((_weights(engine) - _weights(resumed)).abs().max() / _weights(engine).abs().max())
        require(apart < 1e-3, f"after a resume the weights are {apart:.1e} of the largest away from an unbroken run")
    return {"skipped": skipped, "gradient_error": error, "resumed_apart": apart, "last_scale": scale}


def shadow_offload(device: str, folder: Path) -> Figures:
    """Offload actor and optimizer between updates; a BF16 shadow's log-probs must stay those of the actor's weights."""
    with one_rank(device):
        settings = ShadowSettings(dtype="bf16", ratio_source="shadow")
        on_gpu = device != "cpu"
        offloaded = _build_engine(device, "fp32", shadow=settings, param_offload=on_gpu, optimizer_offload=on_gpu)
        plain = _build_engine(device, "fp32")
        gaps = []
        for _ in range(4):
            shadows, actors = (_log_probs(engine) for engine in (offloaded, plain))
            gaps.append(float((shadows - actors).abs().mean()))
            for engine in (offloaded, plain):
                _update(engine, planted=False)
        moved = float((_log_probs(plain) - actors).abs().mean())
    require(gaps[-1] < 0.25 * moved, f"the shadow is {gaps[-1]:.1e} nats from the actor; one update moves {moved:.1e}")
    return {"gap_nats": gaps[-1], "one_update_nats": moved}


def _build_engine(device: str, dtype: str, strategy: str = "fsdp2", **ours: Any) -> Any:
    """Build verl's engine around a tiny model. What else is ours in its config: fields of `PrecisionFSDPConfig`."""
    if device == "cpu":
        torch.set_num_threads(1)  # the model is tiny
    model = HFModelConfig(
        path=str(cached_tiny_model("qwen3")),
        use_remove_padding=True,
        enable_gradient_checkpointing=True,
        override_config={"attn_implementation": "sdpa"},
    )
    model.model_type = "language_model"
    engine = EngineRegistry.get_engine_cls("language_model", strategy)(
        model_config=model,
        engine_config=PrecisionFSDPConfig(
            strategy=strategy,
            fsdp_size=-1,
            use_torch_compile=False,
            dtype=long(dtype),
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            **ours,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, lr_scheduler_type="constant", total_training_steps=1000),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra"]),
    )
    engine.initialize()
    return engine


def _batch() -> Any:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 90, (length,), generator=generator) for length in (12, 20, 7)]
    switches = {"use_remove_padding": True, "calculate_entropy": True, "update_lr_scheduler": True}
    return engine_batch(sequences, max_token_len_per_gpu=32, **switches)


def _loss(planted: bool) -> Loss:
    def mean_log_prob(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        loss = -model_output["log_probs"].values().float().mean()
        return loss * (float("inf") if planted else 1.0), {}

    return mean_log_prob


def _update(engine: Any, planted: bool) -> None:
    with engine.train_mode():
        engine.train_batch(_batch(), _loss(planted))


def _log_probs(engine: Any) -> Tensor:
    with engine.eval_mode():
        return engine.infer_batch(_batch())["model_output"]["log_probs"].values().cpu()


def _gradient(engine: Any) -> Tensor:
    """Return the unscaled gradient; a scaler counts it as a healthy update."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(_batch(), _loss(planted=False))
        if engine.scaler is not None:
            engine.scaler.unscale_(engine.optimizer)
        found = torch.cat([_whole(p.grad).flatten().double().cpu() for p in engine.module.parameters()])
        if engine.scaler is not None:
            engine.scaler.update()
        engine.optimizer_zero_grad()
    return found


def _weights(engine: Any) -> Tensor:
    return torch.cat([_whole(p.detach()).flatten().float().cpu() for p in engine.module.parameters()])


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
