"""`check --model`: weights counted exactly, within a bound of memory."""

import json

import pytest
import torch
from safetensors.torch import save, save_file
from typer.testing import CliRunner

from verl_precision.base.errors import ConfigurationError
from verl_precision.cli import app
from verl_precision.tools.checking import checkpoint
from verl_precision.tools.checking.checkpoint import audit_checkpoint

runner = CliRunner()
# A 7B model's largest tensor: vocabulary x hidden; here as one shard of its own.
WIDE = (9_500, 3_584)  # eight slices
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
    assert not report.ok and report.verdict.startswith("this model cannot run in FP16: 1 weight(s) in 1 tensor(s)")


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
    assert report.ok and "have more than 1% of their weights rounded to zero" in report.verdict


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


def test_memory_is_that_of_a_slice(tmp_path, monkeypatch):
    """Of a tensor of eight slices, as a sparse file."""
    elements = WIDE[0] * WIDE[1]
    header = json.dumps({"w": {"dtype": "BF16", "shape": WIDE, "data_offsets": [0, 2 * elements]}})
    header = header.ljust((len(header) + 7) // 8 * 8).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * elements)
    seen, slices = [], checkpoint._slices
    monkeypatch.setattr(checkpoint, "_slices", lambda *of: (seen.append(len(each)) or each for each in slices(*of)))
    report = audit_checkpoint(tmp_path)
    assert report.ok and report.tensors[0].elements == elements == sum(seen)
    assert max(seen) <= checkpoint.SLICE_ELEMENTS


def test_command_line(tmp_path):
    bad = runner.invoke(app, ["check", "--model", str(_shards(tmp_path, {"w": torch.full((3,), 1e5)})), "--json"])
    content = json.loads(bad.stdout)
    assert bad.exit_code == 1 and content["ok"] is False
    assert content["weights"]["tensors"][0]["overflows"] == 3
    assert runner.invoke(app, ["check", "--model", str(tmp_path / "none")]).exit_code == 1
