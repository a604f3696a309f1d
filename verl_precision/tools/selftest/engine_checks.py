"""Part A: updates and overflows of verl's FSDP engine with ours on top, on one device."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_precision.base.dtypes import long
from verl_precision.base.errors import require
from verl_precision.engine.loss_scaling import LossScaler, local_part
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.tools.selftest.checks import NO_FSDP1, Figures, check
from verl_precision.tools.tiny_model import cached_tiny_model

_UPDATES, _SAVED_AFTER = 50, 25
_GROWTH_INTERVAL, _FIRST_SCALE = 8, 1024.0
_PLANTED = {3, 4, 17, 30, 41}  # two in a row; before and after the checkpoint
_OVERFLOWS = 500


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


@check(
    "offload_overflow", "A", "500 overflows under offload_policy, none missed",
    needs_gpu="gradients and loss scale are on one device",
)  # fmt: skip
def offload_overflow(device: str, folder: Path) -> Figures:
    """Plant 500 overflows in gradients on the host while the GPU is busy, in each step but the first and the last.

    Under `offload_policy` torch's scaler copies 1/S and its found-inf flag to the host and does not wait for them. Ours
    must miss no overflow, and divide every finite gradient by the scale.
    """
    from verl_precision.tools.selftest.single_rank import one_rank

    counts = {"missed": 0, "misread": 0, "false_alarms": 0}
    with one_rank("cuda"):
        scaler = LossScaler(LossScaleSettings(initial=_FIRST_SCALE, growth_interval=10**9), "cuda")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        mesh, dtypes = init_device_mesh("cuda", (1,)), MixedPrecisionPolicy(torch.float16, torch.float32)
        for module in [*model, model]:
            fully_shard(module, mesh=mesh, mp_policy=dtypes, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        busy, inputs = torch.randn(4096, 4096, device="cuda").half(), torch.randn(8, 64, device="cuda")
        for step in range(_OVERFLOWS + 2):
            planted = 0 < step <= _OVERFLOWS
            optimizer.zero_grad()
            scaler.scale(model(inputs).float().square().mean()).backward()
            first, last = [local_part(p.grad) for p in model.parameters() if p.grad is not None and p.dim() == 2]
            expected = first / scaler.get_scale()  # get_scale waits: the stream is empty from here on
            if planted:
                last.view(-1)[step % last.numel()] = float("inf")
            for _ in range(40):  # some 10 ms of an H100
                torch.mm(busy, busy)
            scaler.unscale_(optimizer)
            torch.cuda.synchronize()  # by now every copy has arrived
            counts["misread"] += not torch.allclose(first, expected)
            skips = any(float(flag) for flag in scaler._found_inf_per_device(optimizer).values())
            counts["missed"] += planted and not skips
            counts["false_alarms"] += skips and not planted
            scaler.step(optimizer)
            scaler.update(_FIRST_SCALE)
    problem = ", ".join(f"{key} {value}" for key, value in counts.items())
    require(not any(counts.values()), f"of {_OVERFLOWS} overflows: {problem}", "Keep offload_policy=False here.")
    return {**counts}
