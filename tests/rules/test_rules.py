"""Each seeded fault is found, by name, with its setting and a remedy; nothing else is."""

import ast
import importlib.util
import re

import pytest

from verl_precision.integration.preflight import find_problems
from verl_precision.rules.book import find_faults
from verl_precision.rules.dtype_rules import VLLM_REFUSES_FP16
from verl_precision.rules.rule import RULES, Environment

ACTOR = "actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
FP16 = "{param_dtype: fp16, reduce_dtype: fp32, buffer_dtype: fp32}"

# name, severity, end of the setting, overrides on verl's own config
SEEDED = [
    ("dtype-ignored", "error", "fsdp_config.dtype", [f"{FSDP}.dtype=float16", f"{ROLLOUT}.dtype=float16"]),
    ("rollout-contradicts-actor", "error", "rollout.dtype", [f"{FSDP}.dtype=float16", f"{ROLLOUT}.dtype=float16"]),
    ("rollout-contradicts-actor", "error", "rollout.dtype", ["+precision=fp16", f"{ROLLOUT}.dtype=bfloat16"]),
    ("rollout-contradicts-actor", "error", "rollout.dtype", [f"+{FSDP}.mixed_precision={FP16}"]),
    ("rollout-contradicts-actor", "warning", "rollout.dtype", [f"{ROLLOUT}.dtype=auto"]),
    (
        "ref-differs-from-actor",
        "warning",
        "ref.fsdp_config.mixed_precision.param_dtype",
        [f"+{FSDP}.mixed_precision={FP16}", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.use_kl_loss=True"],
    ),
    (
        "critic-differs-from-actor",
        "warning",
        "critic.fsdp.mixed_precision.param_dtype",
        [f"+{FSDP}.mixed_precision={FP16}", f"{ROLLOUT}.dtype=float16", "critic.enable=True"],
    ),
    ("half-master-weights", "error", "model_dtype", [f"{FSDP}.model_dtype=bf16"]),
    ("half-master-weights", "error", "critic.fsdp.model_dtype", ["critic.enable=True", "critic.fsdp.model_dtype=bf16"]),
    (
        "half-master-weights",
        "warning",
        "model_dtype",
        [f"{FSDP}.model_dtype=bf16", "actor_rollout_ref.model.lora_rank=8"],
    ),
    (
        "half-weights",
        "warning",
        "ref.fsdp_config.model_dtype",
        [f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.fsdp_config.model_dtype=bf16"],
    ),
    ("adam-eps-underflow", "error", "optim.override_optimizer_config.eps", [f"{FSDP}.model_dtype=fp16"]),
    (
        "merged-lora-rounds",
        "error",
        "lora.merge",
        [
            "+precision=fp16",
            f"{FSDP}._target_=verl.workers.config.FSDPEngineConfig",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.lora.merge=True",
        ],
    ),
    ("transport-rounds", "error", "backend", ["+precision=fp16", f"{ROLLOUT}.checkpoint_engine.backend=nccl"]),
    ("megatron-fp16-overflow", "error", "megatron.dtype", ["model_engine=megatron", f"{ACTOR}.megatron.dtype=float16"]),
    (
        "loss-scaling",
        "warning",
        "param_dtype",
        [
            "+precision=fp16",
            f"{FSDP}._target_=verl.workers.config.FSDPEngineConfig",
            "trainer.device=cuda",
            "trainer.save_freq=5",
        ],
    ),
    (
        "export-rounds",
        "warning",
        "save_contents",
        [
            "+precision=fp16",
            f"{FSDP}._target_=verl.workers.config.FSDPEngineConfig",
            "trainer.save_freq=5",
            f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
        ],
    ),
    ("rollout-quantised", "warning", "quantization", [f"{ROLLOUT}.quantization=fp8"]),
    (
        "normalizer-missing",
        "error",
        "loss_scale_factor",
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    ),
    (
        "bypass-without-loss",
        "error",
        "bypass_mode",
        [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=sequence"],
    ),
    ("bypass-clips-mismatch", "warning", "bypass_mode", [f"{CORRECTION}.bypass_mode=True"]),
    ("bypass-loss-unconfigured", "error", "rollout_correction", [f"{ACTOR}.policy_loss.loss_mode=bypass_mode"]),
    (
        "threshold-misread",
        "error",
        "rollout_is_threshold",
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5"],
    ),
    (
        "threshold-misread",
        "error",
        "rollout_is_threshold",
        [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=1e-9_3"],
    ),
    (
        "threshold-misread",
        "warning",
        "rollout_is_threshold",
        [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=2_10"],
    ),
    (
        "threshold-misread",
        "error",
        "rollout_rs_threshold",
        [f"{CORRECTION}.rollout_rs=seq_sum_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_5"],
    ),
    (
        "k1-bounds-inverted",
        "error",
        "rollout_rs_threshold",
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_5.0"],
    ),
    (
        "clip-ratio-c-ignored",
        "warning",
        "clip_ratio_c",
        ["+estimator=grpo", f"{ACTOR}.clip_ratio_c=10.0"],
    ),
    ("raw-logprobs", "error", "logprobs_mode", [f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.temperature=0.7"]),
    ("raw-logprobs", "warning", "logprobs_mode", [f"{ROLLOUT}.logprobs_mode=raw_logprobs"]),
    ("raw-logprobs", "error", "logprobs_mode", [f"{ROLLOUT}.logprobs_mode=processed_logits"]),
    ("truncated-sampling", "warning", "top_p", [f"{ROLLOUT}.top_p=0.9"]),
    ("truncated-sampling", "error", "top_k", [f"{ROLLOUT}.top_k=50", f"{CORRECTION}.rollout_is=token"]),
    (
        "temperature-in-half",
        "warning",
        "temperature",
        [f"{ROLLOUT}.temperature=0.7", f"{FSDP}._target_=verl.workers.config.FSDPEngineConfig"],
    ),
    (
        "logprobs-missing",
        "error",
        "calculate_log_probs",
        [f"{ROLLOUT}.calculate_log_probs=False", f"{CORRECTION}.rollout_is=token"],
    ),
    (
        "logprobs-missing",
        "warning",
        "calculate_log_probs",
        [f"{ROLLOUT}.calculate_log_probs=False", "trainer.v1.trainer_mode=vp_sync"],
    ),
]
# faults that come with another, because one setting breaks two things
COMPANIONS = {
    "adam-eps-underflow": {"half-master-weights"},
    "dtype-ignored": {"rollout-contradicts-actor"},
    "rollout-contradicts-actor": {"dtype-ignored"},
    "megatron-fp16-overflow": {"rollout-contradicts-actor"},
    "raw-logprobs": {"temperature-in-half"},
}


@pytest.fixture
def compose(compose_verl):
    def run(*overrides: str):
        # with the rollout's log-probs, so that the rules about them have something to look at
        base = [] if any("calculate_log_probs" in o for o in overrides) else [f"{ROLLOUT}.calculate_log_probs=True"]
        base += ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm"]
        return compose_verl(*base, *overrides, return_hydra_config=True)

    return run


def test_verls_own_config_has_no_fault(compose):
    assert find_faults(compose(), Environment()) == []


@pytest.mark.parametrize(
    ("name", "severity", "setting", "overrides"), SEEDED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_seeded_fault_is_found(compose, name, severity, setting, overrides):
    faults = find_faults(compose(*overrides), Environment())
    (found,) = [fault for fault in faults if fault.name == name]
    assert found.severity == severity
    assert found.setting.endswith(setting)
    assert found.allowed and found.remedy and found.problem.endswith((".", ". "))
    assert {fault.name for fault in faults} - {name} <= COMPANIONS.get(name, set()) | {"loss-scaling"}


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"],
        [f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=0.999_1.001"],
        [f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=0.01"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"],
        [f"{FSDP}.model_dtype=bf16", f"{ACTOR}.optim.optimizer_impl=torchao.optim"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=512"],
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.calculate_log_probs=False"],
        [f"{ROLLOUT}.dtype=half", "+precision=fp16", "trainer.device=cuda", "trainer.save_freq=-1"],
        ["+precision=fp16", "trainer.save_freq=-1", f"{ROLLOUT}.checkpoint_engine.backend=naive"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_what_is_right_is_left_alone(compose, overrides):
    assert find_faults(compose(*overrides), Environment()) == []


def test_k1_remedy_keeps_what_was_meant(compose):
    """The remedy, put in, keeps [0.5, 5] in verl's own arithmetic: -log r within [log 0.2, log 2]."""
    faults = find_faults(
        compose(f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_5.0"), Environment()
    )
    remedy = faults[0].remedy.removesuffix(".").rpartition("=")[2]
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    ratios = torch.tensor([[0.4, 0.6, 1.0, 4.0, 6.0]])
    mask, _ = compute_rollout_rejection_mask(ratios.log(), torch.ones_like(ratios), "token_k1", remedy)
    assert mask.tolist() == [[0, 1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("vllm", "gpus", "extra", "found"),
    [
        ("0.11.0", ("NVIDIA A100-SXM4-80GB",), [], True),
        ("0.28.0", ("NVIDIA A100-SXM4-80GB",), [], False),
        ("0.11.0", ("NVIDIA H100 80GB HBM3",), [], False),
        ("0.11.0", ("NVIDIA A100-SXM4-80GB",), [f"+{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True"], False),
        ("0.28.0", ("NVIDIA A100-SXM4-80GB",), [f"+{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=False"], True),
        (None, ("NVIDIA A100-SXM4-80GB",), [], False),
    ],
)
def test_cascade_attention(compose, vllm, gpus, extra, found):
    names = [fault.name for fault in find_faults(compose(*extra), Environment(vllm, gpus))]
    assert names == (["cascade-attention"] if found else [])


LORA = "actor_rollout_ref.model.lora"


@pytest.mark.parametrize(
    ("vllm", "extra", "found"),
    [
        ("0.29.0", [f"{LORA}_rank=8"], True),
        ("0.29.0rc1", [f"{LORA}_rank=8"], True),
        ("0.31.0", [f"{LORA}.rank=8"], True),
        ("0.31.0", [f"{LORA}_rank=8", f"{LORA}.merge=True"], False),
        ("0.31.0", [f"{LORA}_rank=8", f"{ROLLOUT}.name=sglang"], False),
        ("0.31.0", [], False),
        ("0.28.0", [f"{LORA}_rank=8"], False),
        ("0.24.0", [f"{LORA}_rank=8"], False),
        (None, [f"{LORA}_rank=8"], False),
    ],
)
def test_verl_cannot_load_an_adapter_into_this_vllm(compose, monkeypatch, root, vllm, extra, found):
    monkeypatch.chdir(root)
    config = compose("+precision=fp16", "trainer.save_freq=-1", *extra)
    faults = find_faults(config, Environment(vllm))
    assert [(fault.name, fault.severity) for fault in faults] == ([("adapter-not-loadable", "error")] if found else [])
    if found:
        assert f"vLLM {vllm}" in faults[0].problem and f"{LORA}.merge=True" in faults[0].remedy
    monkeypatch.setattr("verl_precision.integration.preflight.installed_vllm", lambda: vllm)
    refused = [problem for problem in find_problems(config) if "[adapter-not-loadable]" in problem]
    assert len(refused) == found, "the preflight looks at the vLLM that is installed"


@pytest.mark.parametrize("kind", VLLM_REFUSES_FP16)
def test_architecture_that_vllm_refuses_in_fp16(compose, kind):
    environment = Environment(model={"model_type": kind})
    faults = find_faults(compose("+precision=fp16", "trainer.save_freq=-1"), environment)
    assert [fault.name for fault in faults] == ["vllm-refuses-fp16"]
    assert find_faults(compose("+precision=bf16"), environment) == []


def test_the_list_of_refused_architectures_is_vllms():
    """verl_precision lists at least what the installed vLLM refuses (read from its source: importing it is slow)."""
    from pathlib import Path

    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    tree = ast.parse((root / "config" / "model.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_FLOAT16_NOT_SUPPORTED_MODELS"
    ]
    assert values, "vLLM changed: vllm/config/model.py has no _FLOAT16_NOT_SUPPORTED_MODELS"
    assert set(ast.literal_eval(values[0])) <= set(VLLM_REFUSES_FP16)


def test_a_preset_that_names_a_pair_is_believed_and_an_override_of_it_is_not(compose):
    """No list of pairs is kept: Hydra records which halves the chosen preset is made of."""

    def found(*overrides: str) -> bool:
        faults = find_faults(compose("+precision=bf16_train_fp16_rollout", *overrides), Environment())
        return "rollout-contradicts-actor" in [fault.name for fault in faults]

    assert not found()
    assert found(f"{ROLLOUT}.dtype=float32")


def test_merged_lora_is_exact_with_our_engine(compose):
    lora = "actor_rollout_ref.model.lora"
    config = compose("+precision=fp16", f"{lora}.merge=True", f"{lora}.rank=8")
    assert "merged-lora-rounds" not in [fault.name for fault in find_faults(config, Environment())]


def test_preflight_refuses_the_errors_and_not_the_warnings(compose, root, monkeypatch):
    monkeypatch.chdir(root)
    problems = find_problems(compose("+precision=fp16", f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.top_p=0.9"))
    text = "\n".join(problems)
    assert f"{ROLLOUT}.dtype='bfloat16'" in text and "[rollout-contradicts-actor]" in text
    assert "truncated-sampling" not in text


def test_every_rule_is_in_the_catalogue(root):
    """And the catalogue names no other: docs/precision.md."""
    table = (root / "docs" / "precision.md").read_text().partition("## Failure modes")[2]
    rows = [line.rpartition(" | ")[2] for line in table.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`([\w-]+)`", "".join(rows)))
    assert named == {rule.name for rule in RULES}


def test_texts_of_every_rule_are_complete():
    for rule in RULES:
        assert rule.condition.__doc__, rule.name
        if rule.setting:  # otherwise its cases are errors, which bring their own texts
            assert rule.problem and rule.remedy.endswith((".", "}")), rule.name


def test_rules_import_neither_verl_nor_vllm(run_python):
    done = run_python("import sys\nimport verl_precision.rules.book\nprint({'verl', 'vllm', 'ray'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr
