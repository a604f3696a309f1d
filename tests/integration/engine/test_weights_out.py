"""What goes out is what was trained: the logits of an export, and of a rollout that was sent it, are the trainer's.

All tiny architectures, with adapters on different modules, merged and served. FSDP's shards: tests/engine/ranks.py.
What vLLM computes: tests/weight_sync.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.engine.weight_export import adapter_layers, merged_lora, served_lora
from verl_precision.tools.export.session import export_checkpoint
from verl_precision.tools.tiny_model import ARCHITECTURES, cached_tiny_model

HEAD, EMBEDDINGS = ["q_proj", "lm_head"], ["embed_tokens"]
# What an adapter is on, or has besides; None: all weights are trained.
ADAPTERS = {
    "full": None,
    "all-linear": {"target_modules": "all-linear"},
    "experts": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "head": {"target_modules": HEAD},
    "embeddings": {"target_modules": EMBEDDINGS},
    "head copied": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "patterns": {"target_modules": ["q_proj", "o_proj"], "use_rslora": True, "rank_pattern": {"o_proj": 2}},
}
MOE = ("qwen3_moe", "qwen3_next", "glm4_moe")  # to whose experts PEFT gives adapters with all-linear
TIED = ("qwen3_tied", "gemma3", "gemma4")
PARTED = ("head", "embeddings", "head copied")  # from what the head is tied to
ALL = ("qwen3_tied", "qwen3_moe")
# All adapters on a tied and on a sparse model, the commonest on the others. The rest is the long product.
PAIRS = [
    pytest.param(name, adapter, marks=[] if name in ALL or adapter == "all-linear" else [pytest.mark.matrix])
    for name in sorted({*ARCHITECTURES} - {"qwen3_rough"})
    for adapter in ADAPTERS
    if (name, adapter) != ("glm4_moe", "all-linear")  # transformers cannot run what PEFT makes of its router
]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr("verl.utils.device.get_device_id", lambda: "cpu")


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))).logits


@torch.no_grad()
def trained(architecture, adapter, dtype=torch.float32):
    """Return a model whose trained weights were moved by an amount that shows."""
    model = AutoModelForCausalLM.from_pretrained(cached_tiny_model(architecture), dtype=dtype)
    if adapter is not None:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **adapter))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def engine_of(model, merge) -> SimpleNamespace:
    layers = adapter_layers(model, merge, "...")
    described = SimpleNamespace(hf_config=model.config)
    return SimpleNamespace(module=model, model_config=described, adapter_layers=layers, _is_offload_param=False)


def exported(model, architecture, folder):
    """Return what transformers loads of an export of what one rank of this engine saves."""
    actor = folder / "global_step_1" / "actor"
    shutil.copytree(
        cached_tiny_model(architecture), actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors")
    )
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    if isinstance(model, PeftModel):
        model.peft_config["default"].save_pretrained(actor)
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    export_checkpoint(actor.parent, "fp32", folder / "out")
    return AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)


def rollout(model, architecture, merge, folder):
    """Return a model like the rollout's, with the weights that the engine sends."""
    path, engine = cached_tiny_model(architecture), engine_of(model, merge)
    if merge:
        sent = dict(merged_lora(engine))
        assert all(weight.dtype == torch.float32 for weight in sent.values())
        folder.mkdir()
        save_file(sent, folder / "model.safetensors", {"format": "pt"})
        shutil.copy(path / "config.json", folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = model.peft_config["default"]
    served = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), settings)
    assert not set_peft_model_state_dict(served, dict(served_lora(engine))).unexpected_keys
    return served


def refused(architecture, adapter, merge) -> bool:
    if merge:
        return architecture in TIED and adapter in PARTED
    return (architecture in MOE and adapter in ("all-linear", "experts")) or adapter == "head copied"


@pytest.mark.parametrize(("architecture", "adapter"), PAIRS)
def test_what_goes_out_computes_what_the_trainer_computes(architecture, adapter, tmp_path):
    model = trained(architecture, ADAPTERS[adapter])
    expected, before = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    near = dict(atol=1e-4 * float(expected.abs().max()), rtol=0)
    base = logits(AutoModelForCausalLM.from_pretrained(cached_tiny_model(architecture), dtype=torch.float32))
    assert not torch.allclose(base, expected, atol=30 * near["atol"], rtol=0), "training shows"
    torch.testing.assert_close(logits(exported(model, architecture, tmp_path)), expected, **near)
    for merge in (True, False) if ADAPTERS[adapter] else ():
        if refused(architecture, adapter, merge):
            with pytest.raises(ConfigurationError, match=r"target_modules.*cannot be sent to the rollout"):
                engine_of(model, merge)
        else:
            torch.testing.assert_close(logits(rollout(model, architecture, merge, tmp_path / "sent")), expected, **near)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "the trainer's stay"
