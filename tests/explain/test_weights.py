"""Which tensors two checkpoints differ in is said in words."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from verl_precision.explain.weights import different_weights
from verl_precision.tiny_model import cached_tiny_model


@pytest.fixture
def changed(tmp_path):
    def change(how):
        shutil.copytree(cached_tiny_model("qwen3"), tmp_path / "changed")
        (file,) = (tmp_path / "changed").glob("*.safetensors")
        tensors = load_file(file)
        how(tensors)
        save_file(tensors, file, {"format": "pt"})
        return str(tmp_path / "changed")

    return change


def test_equal_weights():
    assert different_weights("tiny:qwen3", "tiny:qwen3") == "0 of 47 tensors differ"


def test_a_stale_head(changed):
    other = changed(lambda tensors: tensors["lm_head.weight"].add_(1))
    assert different_weights(other, "tiny:qwen3") == "1 of 47 tensors differ: lm_head.weight"


def test_a_training_step(changed):
    found = different_weights(changed(lambda tensors: [tensor.add_(1) for tensor in tensors.values()]), "tiny:qwen3")
    assert found.startswith("47 of 47 tensors differ: lm_head.weight, model.embed_tokens.weight, ")
    assert found.endswith(", ...")


def test_a_tensor_that_is_not_there(changed):
    found = different_weights(changed(lambda tensors: tensors.pop("lm_head.weight")), "tiny:qwen3")
    assert found == "1 of 47 tensors differ: lm_head.weight"
