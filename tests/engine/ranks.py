"""What runs in the spawned ranks: real FSDP2 over gloo, real verl engines, a tiny Qwen3. Prints JSON for the test.

python ranks.py RANK WORLD RENDEZVOUS_FILE SCRATCH_FOLDER
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from verl_precision.engine.settings import LossScaleSettings, ShadowSettings
from verl_precision.errors import VerlPrecisionError
from verl_precision.integration.engine_config import PrecisionFSDPConfig
from verl_precision.tiny_model import cached_tiny_model

LONG = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def make_engine(
    dtype="fp16",
    plain=False,
    cls=None,
    model_type="language_model",
    fsdp_size=-1,
    lora=None,
    save=("model", "optimizer", "extra"),
    **ours,
):
    settings = dict(
        strategy="fsdp2",
        fsdp_size=fsdp_size,
        use_torch_compile=False,
        dtype=LONG[dtype],
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    cls = cls or EngineRegistry.get_engine_cls(model_type, "fsdp2")
    model = HFModelConfig(
        path=str(cached_tiny_model("qwen3")),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        **(lora or {}),
    )
    model.model_type = model_type
    torch.manual_seed(0)  # the value head is drawn
    engine = cls(
        model_config=model,
        engine_config=FSDPEngineConfig(**settings) if plain else PrecisionFSDPConfig(**settings, **ours),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", total_training_steps=100),
        checkpoint_config=CheckpointConfig(save_contents=list(save)),
    )
    engine.initialize()
    return engine


def batch(last=True):
    generator = torch.Generator().manual_seed(dist.get_rank())
    sequences = [torch.randint(3, 90, (n,), generator=generator) for n in (5, 8)]

    def nested(tensors):
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(len(s)) for s in sequences]),
            "loss_mask": nested([torch.ones(len(s)) for s in sequences]),
            "temperature": torch.tensor([0.7, 1.3]),
        },
        non_tensor_dict=dict(
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            use_remove_padding=False,
            use_fused_kernels=False,
            calculate_entropy=True,
            update_lr_scheduler=last,
        ),
    )


def loss_function(model_output, data, dp_group):
    if "values" in model_output:
        loss = model_output["values"].values().float().square().mean()
        return loss, {}
    log_probs = model_output["log_probs"].values()
    return -log_probs.float().mean(), {"seen/log_probs_dtype": [str(log_probs.dtype)]}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(engine):
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch(), loss_function)
        if engine.scaler is not None:
            engine.scaler.unscale_(engine.optimizer)
        found = torch.cat([full(p.grad).flatten().double() for p in engine.module.parameters()])
    if engine.scaler is not None:
        engine.scaler.update()
    return found


def local_parameters(engine):
    return torch.cat([p.to_local().flatten() for p in engine.module.parameters()]).detach().clone()


def poison(engine, value, rank=0):
    """From now on, the gradient of one rank's first parameter holds `value` after each backward."""
    verls = type(engine).forward_backward_batch

    def poisoned(*args, **kwargs):
        outputs = verls(engine, *args, **kwargs)
        if dist.get_rank() == rank:
            next(engine.module.parameters()).grad.to_local().view(-1)[0] = value
        return outputs

    engine.forward_backward_batch = poisoned


def cure(engine):
    del engine.forward_backward_batch


def step(engine, last=True):
    before = local_parameters(engine)
    with engine.train_mode():
        outputs = engine.train_batch(batch(last), loss_function)
    lr = engine.lr_scheduler_step() if last else None
    return {
        "changed": not torch.equal(before, local_parameters(engine)),
        "finite": bool(torch.isfinite(local_parameters(engine)).all()),
        "scale": engine.scaler.get_scale() if engine.scaler else None,
        "lr": lr,
        "metrics": {k: v for k, v in outputs["metrics"].items() if k.startswith(("precision/", "grad_norm", "seen/"))},
    }


def precision(scratch):
    """dtypes inside the model, and gradients against those of an FP32 run."""
    seen = {}
    engine = make_engine("fp16", loss_scale=LossScaleSettings(initial=64.0))

    def record(module, args, output):
        seen.update(inputs=str(args[0].dtype), weight=str(module.weight.dtype), output=str(output.dtype))

    handle = engine.module.model.layers[0].mlp.up_proj.register_forward_hook(record)
    half = gradients(engine)
    handle.remove()
    reference = gradients(make_engine("fp32"))
    return {
        "seen": seen,
        "rope": sorted({str(b.dtype) for name, b in engine.module.named_buffers() if "inv_freq" in name}),
        "parameters": sorted({str(p.dtype) for p in engine.module.parameters()}),
        "relative_error": float((half - reference).norm() / reference.norm()),
        "upstream_bf16_relative_error": float(
            (gradients(make_engine("bf16", plain=True)) - reference).norm() / reference.norm()
        ),
        "engine": type(engine).__name__,
    }


def overflow(scratch):
    """One good step, one with inf on rank 0, two good ones (the scale grows after two)."""
    engine = make_engine("fp16", loss_scale=LossScaleSettings(initial=1024.0, growth_interval=2))
    steps = [step(engine)]
    poison(engine, float("inf"))
    steps.append(step(engine))
    cure(engine)
    steps += [step(engine), step(engine)]
    return steps


def mini_batches(scratch):
    """A training step of three mini-batches of which the second is skipped: the schedule advances, counts add up."""
    engine = make_engine("fp16", loss_scale=LossScaleSettings(initial=1024.0))
    first = step(engine, last=False)
    poison(engine, float("nan"), rank=dist.get_world_size() - 1)
    second = step(engine, last=False)
    cure(engine)
    return [first, second, step(engine)]


def hsdp(scratch):
    """Each rank a replica: inf on one must stop the other."""
    engine = make_engine("fp16", fsdp_size=1, loss_scale=LossScaleSettings(initial=1024.0))
    poison(engine, float("inf"))
    return {"mesh": list(engine.device_mesh.mesh.shape), **step(engine)}


def minimum(scratch):
    """Overflow for ever: the run stops."""
    engine = make_engine("fp16", loss_scale=LossScaleSettings(initial=2.0, minimum=1.0, stop_after_steps_at_minimum=2))
    poison(engine, float("inf"))
    scales = []
    try:
        for _ in range(10):
            scales.append(step(engine)["scale"])
    except VerlPrecisionError as error:
        return {"scales": scales, "error": type(error).__name__, "message": str(error)}
    return {"scales": scales}


def resume(scratch):
    """Save after a skip and a good step, load into a fresh engine: ours goes on, upstream's starts again."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("verl_precision.engine").addHandler(handler)
    settings = LossScaleSettings(initial=1024.0, growth_interval=5)

    engine = make_engine("fp16", loss_scale=settings)
    poison(engine, float("inf"))
    step(engine)
    cure(engine)
    step(engine)
    engine.save_checkpoint(str(scratch / "ours"))
    saved = engine.scaler.state_dict()
    uninterrupted = [step(engine) for _ in range(4)]
    resumed = make_engine("fp16", loss_scale=settings)
    resumed.load_checkpoint(str(scratch / "ours"), del_local_after_load=False)
    loaded = resumed.scaler.state_dict()
    continued = [step(resumed) for _ in range(4)]

    theirs = make_engine("fp16", plain=True)
    theirs.scaler = ShardedGradScaler("cpu", growth_interval=400)  # verl's own would be disabled on a CPU
    step(theirs)
    poison(theirs, float("inf"))
    step(theirs)
    cure(theirs)
    theirs.save_checkpoint(str(scratch / "theirs"))
    upstream_saved = theirs.scaler.state_dict()
    again = make_engine("fp16", plain=True)
    again.scaler = ShardedGradScaler("cpu", growth_interval=400)
    again.load_checkpoint(str(scratch / "theirs"), del_local_after_load=False)

    old = make_engine("fp16", loss_scale=settings)
    assert not messages
    old.load_checkpoint(str(scratch / "theirs"), del_local_after_load=False)
    return {
        "saved": saved,
        "loaded": loaded,
        "uninterrupted": uninterrupted,
        "continued": continued,
        "upstream_saved": upstream_saved,
        "upstream_loaded": again.scaler.state_dict(),
        "old_checkpoint": old.scaler.state_dict(),
        "old_warning": messages,
    }


def upstream(scratch):
    """verl's own engine and scaler on a CPU; and ours without our config, which must be the same bit for bit."""
    with warnings.catch_warnings(record=True):
        theirs = make_engine("fp16", plain=True, cls=transformer_impl.FSDPEngineWithLMHead)
        ours = make_engine("fp16", plain=True)
    found = {"scaler_enabled": theirs.scaler.is_enabled(), "scaler": type(ours.scaler).__name__}
    results = []
    for engine in (theirs, ours):
        with engine.eval_mode():
            outputs = engine.infer_batch(batch())
        steps = [step(engine) for _ in range(2)]
        poison(engine, float("inf"))
        steps.append(step(engine))
        results.append((outputs["model_output"]["log_probs"].values(), local_parameters(engine), steps))
    (log_probs, parameters, steps), (our_log_probs, our_parameters, our_steps) = results
    found["same"] = [
        torch.equal(log_probs, our_log_probs),
        torch.equal(parameters.nan_to_num(), our_parameters.nan_to_num()),
        json.dumps(steps) == json.dumps(our_steps),
    ]
    found["log_probs"] = str(log_probs.dtype)
    found["grad_norm_on_overflow"] = steps[2]["metrics"]["grad_norm"]
    found["lr"] = [s["lr"] for s in steps]
    return found


def others(scratch):
    """The critic in FP16, and the actor in BF16 with our config, which needs no scaler."""
    from transformers import AutoModelForTokenClassification
    from verl.utils import model

    def without_flash_attention(local_path, torch_dtype, model_config, trust_remote_code):
        return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)

    model.load_valuehead_model = without_flash_attention  # verl asks for flash-attn, which needs CUDA
    critic = make_engine("fp16", model_type="value_model", loss_scale=LossScaleSettings(initial=1024.0))
    bf16 = make_engine("bf16")
    steps = [step(bf16)]
    poison(bf16, float("inf"))
    return {"critic": step(critic), "critic_class": type(critic).__name__, "bf16": [*steps, step(bf16)]}


def log_probs(engine):
    with engine.eval_mode():
        return engine.infer_batch(batch())["model_output"]["log_probs"].values()


def importance_weighted(rollout_log_probs, ratio=None):
    """Return Σ exp(log π - log μ), the objective of equation (5) token by token; or with the ratio given."""
    rows = iter(rollout_log_probs), iter(ratio or rollout_log_probs)

    def loss(model_output, data, dp_group):
        log_probs, mu, r = model_output["log_probs"].values().double(), *(next(row) for row in rows)
        return (log_probs.sub(mu).exp() if ratio is None else r * log_probs).sum(), {}

    return loss


def gradient_of(engine, loss):
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch(), loss)
        return torch.cat([full(p.grad).flatten().double() for p in engine.module.parameters()])


def copy_parameters(source, target):
    with torch.no_grad():
        for theirs, mine in zip(source.module.parameters(), target.module.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())


def shadow(scratch):
    """FP32 training with a BF16 shadow as the ratio's source, against a BF16 engine and a plain FP32 one."""
    engine = make_engine("fp32", shadow=ShadowSettings(dtype="bf16", ratio_source="shadow"))
    lengths = batch()["input_ids"].offsets().diff().tolist()
    half, single = make_engine("bf16"), make_engine("fp32")
    found = {"beta": float((log_probs(single) - log_probs(half)).abs().mean()), "same": [], "gradient_error": []}
    for _ in range(2):
        values = log_probs(half)
        found["same"].append(torch.equal(log_probs(engine), values))
        mu = [row - 0.5 for row in values.double().split(lengths)]  # α = 0.5 on every token
        with_shadow = gradient_of(engine, importance_weighted(mu))
        expected = gradient_of(single, importance_weighted(mu, [torch.full_like(row, 0.5).exp() for row in mu]))
        without = gradient_of(single, importance_weighted(mu))
        found["gradient_error"].append([float((g - expected).norm() / expected.norm()) for g in (with_shadow, without)])
        found["changed"] = step(engine)["changed"]  # the shadow must follow
        copy_parameters(engine, half)
        copy_parameters(engine, single)
    return found


def contradiction(scratch):
    """A forward in another dtype than the config's."""
    engine = make_engine("bf16")
    log_probs(engine)
    engine._autocast_dtype = torch.float16
    try:
        log_probs(engine)
    except VerlPrecisionError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def head(scratch):
    """Log-probs of an FP16 engine against FP32, with the head in FP16 and in FP32."""
    reference = log_probs(make_engine("fp32"))
    errors = {}
    for wide in (False, True):
        engine = make_engine("fp16", fp32_output_head=wide)
        seen = []
        engine.module.lm_head.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        errors[str(wide)] = {
            "error": float((log_probs(engine) - reference).abs().mean()),
            "logits": sorted({str(dtype) for dtype in seen}),
        }
    return errors


def export(scratch):
    """What a checkpoint with hf_model holds, and what its config says."""
    from safetensors import safe_open

    found = {}
    for name, plain in (("ours", False), ("theirs", True)):
        engine = make_engine("fp16", plain=plain, save=("model", "hf_model"))
        folder = scratch / f"export_{name}"
        engine.save_checkpoint(str(folder))
        config = json.loads((folder / "huggingface" / "config.json").read_text())
        with safe_open(next((folder / "huggingface").glob("*.safetensors")), "pt") as weights:
            dtypes = sorted({weights.get_slice(key).get_dtype() for key in weights.keys()})
        found[name] = {"config": config.get("dtype", config.get("torch_dtype")), "weights": dtypes}
    return found


def merged_lora(scratch):
    """The weights sent with LoRA merged, against base + scale·B·A in float64; ours and verl's."""
    found = {}
    for name, plain in (("ours", False), ("theirs", True)):
        lora = dict(lora_rank=4, lora_alpha=8, target_modules="all-linear", lora={"merge": True})
        engine = make_engine("fp16", plain=plain, lora=lora)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in engine.module.named_parameters():
                if "lora_B" in key:
                    whole = torch.randn(full(parameter).shape, generator=generator) * 0.01
                    rows = whole.chunk(dist.get_world_size())
                    parameter.to_local().copy_(rows[dist.get_rank()])
        state = {key: full(value).double() for key, value in engine.module.state_dict().items()}
        sent = {key: value for key, value in engine.get_per_tensor_param()[0] if not key.startswith("__")}
        layer = "model.layers.0.mlp.up_proj"
        base, a, b = (
            state[f"base_model.model.{layer}.{part}.weight"]
            for part in ("base_layer", "lora_A.default", "lora_B.default")
        )
        error = (sent[f"{layer}.weight"].double() - (base + 8 / 4 * b @ a)).abs().max()
        after = {key: full(value).double() for key, value in engine.module.state_dict().items()}
        found[name] = {
            "dtypes": sorted({str(value.dtype) for value in sent.values()}),
            "relative_error": float(error / base.abs().max()),
            "restored": all(torch.equal(state[key], after[key]) for key in state),
        }
    return found


def main():
    rank, world, rendezvous, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    scenarios = [precision, overflow, mini_batches, minimum, resume, upstream, others]
    scenarios += [shadow, contradiction, head, export, merged_lora] + ([hsdp] if world > 1 else [])
    found = {}
    for scenario in scenarios:
        found[scenario.__name__] = scenario(scratch)
    (scratch / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
