"""Which tensors two checkpoints differ in is said in words, and an adapter is merged in FP32."""

import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.model import load_tokenizer
from verl_precision.tools.gap.explain.weights import adapter_fingerprint, different_weights, merged_copy
from verl_precision.tools.tiny_model import cached_tiny_model


@pytest.mark.parametrize(("change", "said"), [
    (lambda tensors: None, "0 of 47 tensors differ"),
    (lambda tensors: tensors["lm_head.weight"].add_(1), "1 of 47 tensors differ: lm_head.weight"),
    (lambda tensors: tensors.pop("lm_head.weight"), "1 of 47 tensors differ: lm_head.weight"),
    (lambda tensors: [tensor.add_(1) for tensor in tensors.values()],
     r"47 of 47 tensors differ: lm_head.weight, model.embed_tokens.weight, .*, \.\.\."),
])  # fmt: skip
def test_tensors_that_differ_or_are_not_there_are_named(tmp_path, change, said):
    shutil.copytree(cached_tiny_model("qwen3"), tmp_path / "changed")
    (file,) = (tmp_path / "changed").glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    assert re.fullmatch(said, different_weights(str(tmp_path / "changed"), "tiny:qwen3"))


@pytest.fixture
def adapter(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(cached_tiny_model("qwen3"), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_merged(adapter, tmp_path):
    folder = merged_copy("tiny:qwen3", str(adapter), tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj"
    b, a = (load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{name}.lora_{x}.weight"] for x in "BA")
    (base,), (merged,) = (path.glob("*.safetensors") for path in (cached_tiny_model("qwen3"), tmp_path / "merged"))
    change = load_file(merged)[f"{name}.weight"] - load_file(base)[f"{name}.weight"]
    torch.testing.assert_close(change, 8 / 4 * b @ a, rtol=1e-5, atol=1e-6)
    assert different_weights(folder, "tiny:qwen3").startswith("4 of 47 tensors differ: model.layers.0.self_attn.q_proj")
    assert len(load_tokenizer(folder)) == len(load_tokenizer("tiny:qwen3"))


def test_a_head_is_merged_apart_from_the_embeddings_that_it_is_tied_to(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(cached_tiny_model("qwen3_tied"), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        model.save_pretrained(tmp_path / "adapter")
        folder = merged_copy("tiny:qwen3_tied", str(tmp_path / "adapter"), tmp_path / "merged")
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_a_folder_without_adapter_is_refused(adapter, tmp_path):
    assert len(adapter_fingerprint(str(adapter))) == 16
    with pytest.raises(ConfigurationError, match=r"--adapter .*: there is no adapter in it.*lora_adapter"):
        adapter_fingerprint(str(tmp_path))
