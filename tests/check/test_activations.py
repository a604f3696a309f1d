"""Headroom of activations and gradients; a planted overflow of each is found where it is."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from verl_precision.base.tiny_model import cached_tiny_model
from verl_precision.check.activations import measure_activations
from verl_precision.cli import app

runner = CliRunner()


@pytest.fixture
def planted(tmp_path):
    """Save the tiny model with some weights changed."""

    def save(change):
        source = cached_tiny_model("qwen3")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with torch.no_grad():
            change(model)
        model.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_a_sane_model_fits(architecture):
    report = measure_activations(cached_tiny_model(architecture), loss_scale=1024.0)
    assert report.ok and not report.forward_overflows
    layers = {layer.name: layer for layer in report.layers}
    assert {"model.layers.0.self_attn", "model.layers.3.mlp", "lm_head", "model.embed_tokens"} <= layers.keys()
    assert all(layers[name].output_gradient > 0 for name in ("model.layers.0", "lm_head"))
    assert layers["model.embed_tokens"].weight_gradient > 0


def test_gradients_are_autograds(planted):
    """The weight gradient of the output head, recomputed without any hook."""
    folder = planted(lambda model: None)
    (found,) = [x for x in measure_activations(folder, ["hello world"]).layers if x.name == "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("hello world", return_tensors="pt").input_ids
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert found.weight_gradient == pytest.approx(float(model.lm_head.weight.grad.abs().max()), rel=1e-5)
    assert found.activation == pytest.approx(float(output.logits.detach().abs().max()), rel=1e-5)


def test_planted_activation_overflow(planted):
    def change(model):
        model.model.layers[2].mlp.down_proj.weight.mul_(1e9)

    report = measure_activations(planted(change))
    assert not report.ok and "model.layers.2.mlp.down_proj" in report.forward_overflows
    assert "model.layers.1" not in report.forward_overflows
    assert report.verdict.startswith("not for FP16: the output of")


def test_planted_gradient_overflow_that_the_forward_pass_does_not_show(planted):
    """Norm x 1e-6 and head x 1e6 compute the same logits; the gradient between them is a million times larger."""

    def change(model):
        model.model.norm.weight.mul_(1e-6)
        model.lm_head.weight.mul_(1e6)

    folder = planted(change)
    report = measure_activations(folder)
    assert report.forward_overflows == []
    assert "model.norm" in report.backward_overflows and "model.norm" in [layer.name for layer in report.layers[:3]]
    assert report.largest_safe_scale < 65536 and f"loss scale of {report.largest_safe_scale:g}" in report.verdict
    assert measure_activations(folder, loss_scale=report.largest_safe_scale).backward_overflows == []


def test_command_line_reports_both(planted):
    folder = planted(lambda model: model.model.layers[2].mlp.down_proj.weight.mul_(1e9))
    done = runner.invoke(app, ["check", "--model", str(folder), "--activations", "--json"])
    assert done.exit_code == 1
    content = json.loads(done.stdout)
    assert content["activations"]["ok"] is False
    keys = {"name", "activation", "output_gradient", "weight_gradient", "headroom", "gradient_headroom"}
    assert set(content["activations"]["layers"][0]) == keys
    shown = runner.invoke(app, ["check", "--model", str(cached_tiny_model("qwen3")), "--activations"])
    assert shown.exit_code == 0 and "gradient x 65536" in " ".join(shown.output.split())
