"""`check --model`: weights counted exactly, within a bound of memory; a planted overflow is found where it is."""

import json

import pytest
import torch
from safetensors.torch import save, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from verl_precision.base.errors import ConfigurationError
from verl_precision.cli import app
from verl_precision.tools.checking import checkpoint
from verl_precision.tools.checking.checkpoint import audit_checkpoint, measure_activations
from verl_precision.tools.tiny_model import cached_tiny_model

runner = CliRunner()
# A 7B model's largest tensor: vocabulary x hidden; here as one shard of its own.
SEVEN_B_EMBEDDING = (152064, 3584)
WHOLE = save({"a": torch.ones(100)})


def _shards(folder, *shards):
    weight_map = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_by_hand(tmp_path):
    """65520 is the first FP32 that rounds to inf; 2**-14 the smallest normal; 2**-25 rounds to even, zero."""
    values = [0.0, 1.0, -65504.0, 65519.0, -65520.0, 2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 1e-30]
    report = audit_checkpoint(_shards(tmp_path, {"w": torch.tensor(values)}, {"fine": torch.ones(3, 4)}))
    first, second = report.tensors
    assert (first.name, first.largest, first.overflows, first.not_finite) == ("w", 65520.0, 1, 0)
    assert (first.subnormal, first.flushed) == (0.2, 0.2)
    assert (second.name, second.overflows) == ("fine", 0)
    assert not report.ok and report.verdict.startswith("not for FP16: 1 weight(s) in 1 tensor(s)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (50, 3), (3, 50), (2, 3, 40), (1, 200)])
def test_counts_are_those_of_the_cast_however_it_is_cut(tmp_path, monkeypatch, dtype, shape):
    monkeypatch.setattr(checkpoint, "SLICE_ELEMENTS", 16)
    exponents = torch.empty(shape, dtype=torch.float64).uniform_(-30, 17, generator=torch.Generator().manual_seed(1))
    weights = torch.exp2(exponents).to(dtype)
    save_file({"w": weights}, tmp_path / "model.safetensors")
    (found,) = audit_checkpoint(tmp_path).tensors
    finite = weights[torch.isfinite(weights)].double()
    cast = finite.to(torch.float16).double()
    assert (found.elements, found.overflows) == (weights.numel(), int(torch.isinf(cast).sum()))
    assert found.not_finite == int((~torch.isfinite(weights)).sum())
    assert found.flushed * max(found.elements, 1) == pytest.approx(int(((cast == 0) & (finite != 0)).sum()))
    # a value just below 2**-14 may round up to it: it lost bits all the same
    lossy = (finite < 2.0**-14) & (cast != 0)
    assert found.subnormal * max(found.elements, 1) == pytest.approx(int(lossy.sum()))


def test_not_finite_and_other_types(tmp_path):
    tensors = {"bad": torch.tensor([float("nan"), float("inf"), 2.0]), "ids": torch.arange(3)}
    report = audit_checkpoint(_shards(tmp_path, tensors))
    assert report.skipped == ["ids"] and report.tensors[0].not_finite == 2 and report.tensors[0].largest == 2.0
    assert not report.ok


def test_flushed_weights_are_said_but_allowed(tmp_path):
    save_file({"w": torch.full((100,), 1e-9)}, tmp_path / "model.safetensors")
    report = audit_checkpoint(tmp_path / "model.safetensors")
    assert report.ok and "lose more than 1% of their weights to zero" in report.verdict


@pytest.mark.parametrize(("prepare", "words"), [
    (lambda folder: None, "no safetensors file there"),
    (lambda folder: _shards(folder, {"a": torch.ones(1)}, {"b": torch.ones(1)}), "00002-of-00002.* is not a readable"),
    (lambda folder: (folder / "x.safetensors").write_bytes(b"\0" * 32), "is not a readable safetensors file"),
    (lambda folder: (folder / "x.safetensors").write_bytes(WHOLE[:-100]), "is not a readable safetensors file"),
])  # fmt: skip
def test_what_cannot_be_audited_is_named(tmp_path, prepare, words):
    prepare(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    with pytest.raises(ConfigurationError, match=words):
        audit_checkpoint(tmp_path)


def test_memory_is_that_of_a_slice(run_python, tmp_path):
    """The largest tensor of a 7B model, 1.09 GB in BF16 as a sparse file: peak memory grows by far less than it."""
    elements = SEVEN_B_EMBEDDING[0] * SEVEN_B_EMBEDDING[1]
    header = json.dumps({"w": {"dtype": "BF16", "shape": SEVEN_B_EMBEDDING, "data_offsets": [0, 2 * elements]}})
    header = header.ljust((len(header) + 7) // 8 * 8).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * elements)
    done = run_python(f"""
import psutil, torch
from pathlib import Path
from verl_precision.tools.checking import checkpoint
process, peak = psutil.Process(), []
own = lambda: process.memory_info().rss - process.memory_info().shared  # without pages of mapped files
before = own()
slices = checkpoint._slices
def watched(*of):
    for each in slices(*of):
        yield each
        peak.append(own())
checkpoint._slices = watched
report = checkpoint.audit_checkpoint(Path({str(tmp_path)!r}))
assert report.ok and report.tensors[0].elements == {elements}
print(max(peak) - before, max(peak))
""")
    assert done.returncode == 0, done.stderr
    grown, resident = (int(part) for part in done.stdout.split()[-2:])
    assert grown < 256 << 20 and resident < 2 << 30, (grown, resident)


def test_command_line(tmp_path):
    bad = runner.invoke(app, ["check", "--model", str(_shards(tmp_path, {"w": torch.full((3,), 1e5)})), "--json"])
    content = json.loads(bad.stdout)
    assert bad.exit_code == 1 and content["ok"] is False and content["activations"] is None
    assert content["weights"]["tensors"][0]["overflows"] == 3
    assert runner.invoke(app, ["check", "--model", str(tmp_path / "none")]).exit_code == 1


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


@pytest.mark.parametrize("architecture", ["qwen3_tied", "qwen3_moe"])
def test_a_sane_model_fits(architecture):
    report = measure_activations(cached_tiny_model(architecture))
    assert report.ok and not report.overflows and report.verdict.startswith("activations fit FP16")
    modules = {each.name: each for each in report.modules}
    names = ("model.layers.0", "model.layers.0.self_attn", "model.layers.3.mlp", "lm_head", "model.embed_tokens")
    assert all(modules[name].gradient > 0 for name in names)


def test_gradients_are_autograds(planted):
    """The gradients of the output head, recomputed without any hook."""
    folder = planted(lambda model: None)
    (found,) = [x for x in measure_activations(folder, ["hello world"]).modules if x.name == "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("hello world", return_tensors="pt").input_ids
    output = model(input_ids=ids, labels=ids)
    output.logits.retain_grad()
    output.loss.backward()
    gradients = (model.lm_head.weight.grad, output.logits.grad)
    assert found.gradient == pytest.approx(max(float(each.abs().max()) for each in gradients), rel=1e-5)
    assert found.activation == pytest.approx(float(output.logits.detach().abs().max()), rel=1e-5)


def test_planted_activation_overflow(planted):
    folder = planted(lambda model: model.model.layers[2].mlp.down_proj.weight.mul_(1e9))
    report = measure_activations(folder)
    assert not report.ok and "model.layers.2.mlp.down_proj" in report.overflows
    assert "model.layers.1" not in report.overflows
    assert report.verdict.startswith("not for FP16: the output of")
    done = runner.invoke(app, ["check", "--model", str(folder), "--activations", "--json"])
    content = json.loads(done.stdout)
    assert done.exit_code == 1 and content["activations"]["ok"] is False
    assert set(content["activations"]["modules"][0]) == {"name", "activation", "gradient"}
    shown = runner.invoke(app, ["check", "--model", str(cached_tiny_model("qwen3")), "--activations"])
    assert shown.exit_code == 0 and "every weight fits FP16" in shown.output


def test_planted_gradient_overflow_that_the_forward_pass_does_not_show(planted):
    """Norm x 1e-6 and head x 1e6 compute the same logits; the gradient between them is a million times larger."""
    folder = planted(lambda model: (model.model.norm.weight.mul_(1e-6), model.lm_head.weight.mul_(1e6)))
    report = measure_activations(folder)
    assert report.overflows == [] and "model.norm" in [each.name for each in report.modules[:3]]
    scale = report.largest_safe_scale
    worst = max(each.gradient for each in report.modules)
    assert 1 <= scale < 65536 and worst * scale <= checkpoint.FP16_MAX < worst * scale * 2
    assert f"loss scale of {scale:g} or less" in report.verdict
