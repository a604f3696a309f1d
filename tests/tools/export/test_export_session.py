"""What is refused, by name, and leaves nothing behind; several files; the card. Ranks: tests/engine/ranks.py."""

import json
import os
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from composer import compose_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.integration.trainer.run_identity import RUN_FILE, RunSettings
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.tools.export import session
from verl_precision.tools.export.session import export_checkpoint, model_card
from verl_precision.tools.tiny_model import cached_tiny_model

LARGE = {"model.norm.weight": 65520.0}
ADAPTER = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a tiny model as one rank saves it, with changes to its weights."""

    def write(changes=(), world_size=1, only=()) -> Path:
        actor = tmp_path / "run" / "global_step_3" / "actor"
        model = AutoModelForCausalLM.from_pretrained(cached_tiny_model("qwen3"), dtype=torch.float32)
        model.save_pretrained(actor / "huggingface")
        AutoTokenizer.from_pretrained(cached_tiny_model("qwen3")).save_pretrained(actor / "huggingface")
        weights = {name: torch.ones(4, 4) for name in only} or model.state_dict()
        for name, value in dict(changes).items():
            weights[name].view(-1)[0] = value
        torch.save(weights, actor / f"model_world_size_{world_size}_rank_0.pt")
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
        return actor.parent

    return write


@pytest.mark.parametrize(("settings", "dtype", "words"), [
    (dict(changes=LARGE), "fp16", r"--dtype float16: model.norm.weight \(1 of 64\): "),
    (dict(changes={"lm_head.weight": float("nan")}), "bf16", r"lm_head.weight \(1 of \d+\).*earlier checkpoint"),
    (dict(), "fp8", "--dtype fp8: there is no such dtype. Allowed: .*fp16"),
    (dict(world_size=2), "fp16", "model_world_size_2_rank_1.pt is missing"),
    (dict(only=[ADAPTER]), "fp16", "only the LoRA adapter was saved.*save_lora_only=False"),
    (dict(only=["x", "x.token_adapter.trainable_tokens_delta.default"]), "fp16", "x.token_adapter.* cannot be merged"),
    (dict(only=["x", ADAPTER]), "fp16", "has a LoRA adapter, but no adapter_config.json"),
])  # fmt: skip
def test_what_cannot_be_exported_is_named_and_leaves_nothing(checkpoint, tmp_path, settings, dtype, words):
    with pytest.raises(ConfigurationError, match=words):
        export_checkpoint(checkpoint(**settings), dtype, tmp_path / "out" / "model")
    assert not list(tmp_path.glob("out/*"))


SHARD = "model_world_size_1_rank_0.pt"


class _Calls:
    def __reduce__(self):
        return os.mkdir, ("called",)


@pytest.mark.parametrize(("file", "content", "words"), [
    *(("fsdp_config.json", text, "fsdp_config.json'?: it cannot be read") for text in (
        b"", b"[]", b'{"world_size": "two"}', b"\xff\xfe", b"[" * 99_999,
    )),
    *(("fsdp_config.json", b'{"world_size": %d}' % size, f"model_world_size_{size}_rank_0.pt is missing") for size in (
        0, 10**12,
    )),
    *((SHARD, content, f"{SHARD} is incomplete, or is not a dictionary") for content in (
        b"", b"PK\3\4" + b"\0" * 900, pickle.dumps({"a": _Calls()}), pickle.dumps({"a": 1}),
    )),
    (SHARD, None, f"{SHARD} is incomplete"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_nothing_in_it_is_called(
    checkpoint, tmp_path, monkeypatch, file, content, words
):
    monkeypatch.chdir(tmp_path)
    path = checkpoint() / "actor" / file
    path.write_bytes(path.read_bytes()[:-2000] if content is None else content)
    with pytest.raises(ConfigurationError, match=words):
        export_checkpoint(path.parent, "fp16", tmp_path / "out" / "model")
    assert not list(tmp_path.glob("out/*")) and not (tmp_path / "called").exists()


def test_what_fp16_cannot_hold_is_exported_in_bf16(checkpoint, tmp_path):
    export_checkpoint(checkpoint(LARGE), "bf16", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_failure_while_writing_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(session.shutil, "copytree", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space"):
        export_checkpoint(checkpoint(), "fp16", tmp_path / "out" / "model")
    assert not list((tmp_path / "out").iterdir())


def test_a_large_model_has_several_files_an_index_and_its_tokenizer(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "FILE_BYTES", 100_000)
    export_checkpoint(checkpoint(), "fp16", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "whoever reads one reads all"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert model.dtype == torch.float16 and not info["missing_keys"] and not info["unexpected_keys"]
    before = AutoModelForCausalLM.from_pretrained(cached_tiny_model("qwen3"), dtype=torch.float32).state_dict()
    assert all(torch.equal(value, before[name].half()) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+1")
    assert "k3 between trainer and rollout at step 3 | not recorded" in (tmp_path / "out" / "README.md").read_text()


def test_the_verb_names_its_folder_and_refuses_one_that_exists(checkpoint, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (first, said), (second, refused) = (typed("export", checkpoint() / "actor") for _ in range(2))
    assert first == 0 and "tensors in fp16" in said
    assert (tmp_path / "outputs" / "export" / "run_global_step_3_fp16" / "model.safetensors").is_file()
    assert second == 1 and "it exists; nothing was written" in refused


def card_of(checkpoint, dtype):
    """Return the front matter and the text."""
    _, front, text = model_card(checkpoint, dtype).split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_has_what_is_known_and_claims_nothing_else(tmp_path):
    step = tmp_path / "fp16_grpo-1a2b3c4d" / "global_step_40"
    step.mkdir(parents=True)
    front, text = card_of(step, "fp32")
    assert "| not recorded |" in text and "trained in" not in text and "base_model" not in front
    record = RunSettings.from_config(compose_recipe("recipes/moe/moe.yaml", "precision=fp16")).as_record()
    (step.parent / RUN_FILE).write_text(yaml.safe_dump(record))
    (step / STEP_METRICS).write_text(json.dumps({"mismatch/k3_kl": 2.345e-5, "critic/score/mean": 0.5}))
    front, text = card_of(step, "fp16")
    assert front["base_model"] == record["settings"]["actor_rollout_ref.model.path"] and "/" in front["base_model"]
    for row in (
        *("| k3 between trainer and rollout at step 40 | 2.35e-05 nats per token |", "| trained in | fp16 |"),
        *("| dtype of the weights | float16, each rounded once |", "| loss | vp_"),
        *("| sampled from in | float16 |", "| mean reward at that step | 0.5 |", "torch 2"),
        "verl-precision export fp16_grpo-1a2b3c4d/global_step_40 --dtype fp16",
    ):
        assert row in text
    assert str(tmp_path) not in text, "it is published"
    (step / STEP_METRICS).write_text('{"mismatch/k3_kl": NaN}')
    with pytest.raises(CheckpointStateError, match=r"step_metrics\.json cannot be read .*Remove it"):
        card_of(step, "fp16")
