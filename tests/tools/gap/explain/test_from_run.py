"""A recipe's config gives the settings of an explanation; a run tells what it recorded, and which command to ask."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from kept_responses import response
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.tools.checking.composing import compose_recipe
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.from_run import explained_by, gap_of, recorded_causes, replays_sampling
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.kept_tokens.kept_file import append

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart" / "quickstart.yaml"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
ROLLOUT, FSDP = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config"
SETTINGS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "raw_log_probs": False, "train_dtype": "fp16",
    "rollout_dtype": "fp16", "fp32_log_probs": True, "arithmetic": "native",
}  # fmt: skip


@pytest.fixture(scope="module")
def quickstart():
    return compose_recipe(RECIPE, ["precision=bf16"])


def changed(config, *dotlist):
    return OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config)), OmegaConf.from_dotlist(list(dotlist)))


def test_a_recipe(quickstart):
    settings = explained_by(quickstart)
    assert settings["model"].rpartition("/")[2].startswith("qwen3-")
    assert (settings["train_dtype"], settings["rollout_dtype"], settings["packed"]) == ("bf16", "bf16", True)
    assert settings["prompts"] == "recipes/quickstart/prompts.jsonl"
    assert (settings["cuda_graphs"], settings["attention"]) == (False, "sdpa"), "a CPU has neither"
    assert not replays_sampling(quickstart)


@pytest.mark.parametrize(("change", "name", "value"), [
    (f"trainer.device=cuda {ROLLOUT}.enforce_eager=false", "cuda_graphs", True),
    (f"trainer.device=cuda {ROLLOUT}.enforce_eager=true", "cuda_graphs", False),
    (f"trainer.device=cuda {ATTENTION}=flash_attention_2", "attention", "flash_attention_2"),
    (f"{ROLLOUT}.top_k=-1", "top_k", 0),
    (f"{ROLLOUT}.top_p=0.9", "top_p", 0.9),
    (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "raw_log_probs", True),
    (f"{ROLLOUT}.enable_prefix_caching=false", "prefix_caching", False),
    ("data.max_response_length=20000", "max_response_tokens", 512),
    ("data.train_files=[a.parquet,b.parquet]", "prompts", "a.parquet"),
    (f"{FSDP}.fp32_log_probs=false", "fp32_log_probs", False),
    (f"{FSDP}.fp32_output_head=true", "fp32_output_head", True),
    (f"{ARITHMETIC_SETTING}=exact", "arithmetic", "exact"),
    (f"{ARITHMETIC_SETTING}=exact trainer.device=cuda", "arithmetic", "native"),
    (f"{FSDP}._target_=verl.workers.config.FSDPEngineConfig", "fp32_log_probs", False),
])  # fmt: skip
def test_settings_follow_the_config(quickstart, change, name, value):
    assert explained_by(changed(quickstart, *change.split()))[name] == value


@pytest.mark.parametrize("change", ["actor_rollout_ref.actor.strategy=megatron", f"{ROLLOUT}.name=sglang"])
def test_another_engine_is_refused(quickstart, change):
    setting, _, value = change.partition("=")
    with pytest.raises(ConfigurationError, match=f"{setting}='{value}'.*Allowed: .*Explain the model alone"):
        explained_by(changed(quickstart, change))


def test_options_give_the_settings_back(quickstart, monkeypatch, tmp_path, root, typed):
    """The command that is printed asks for what the recipe asks for, and so does --recipe."""
    monkeypatch.chdir(root)
    explain = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(session, "explain", explain)
    recipe = ["--recipe", "recipes/quickstart/quickstart.yaml", "precision=bf16"]
    options = as_options(Explanation, explained_by(quickstart))
    for arguments in (options, recipe, ["--top-p", "0.8", "--max-prompts", "2", *recipe]):
        code, said = typed("explain", "--output", tmp_path / "out", *arguments)
        assert code == 130, said
    of_options, of_recipe, overridden = (call.args[0] for call in explain.call_args_list)
    assert of_options == of_recipe and of_recipe.max_prompts == 16
    assert overridden.top_p == 0.8 and overridden.max_prompts == 2, "an option goes before the recipe"


def row(step, **metrics):
    return {"step": step, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def found_in(rows=(), masks=False, **settings):
    return {one.cause: one for one in recorded_causes({**SETTINGS, **settings}, masks, rows)}


@pytest.mark.parametrize(("settings", "cause", "fault"), [
    ({"top_p": 0.8}, "sampling", True),
    ({"top_k": 20, "masks": True}, "sampling", False),
    ({"raw_log_probs": True, "temperature": 0.7}, "temperature", True),
    ({"raw_log_probs": True}, "temperature", False),
    ({"fp32_log_probs": False}, "log_probs", True),
    ({"train_dtype": "bf16"}, "weight_rounding", None),
    ({}, "rollout_precision", None),
])  # fmt: skip
def test_what_the_config_tells(settings, cause, fault):
    assert found_in(**settings)[cause].fault is fault
    assert bool(found_in(**settings)[cause].remedy) == (fault is True)


def test_a_healthy_config_has_no_other_cause():
    assert found_in().keys() == {"rollout_precision", "trainer_precision"}
    assert not found_in(train_dtype="fp32", rollout_dtype="fp32")


def test_the_canary():
    within = [row(step, weight_sync__canary_gap=1e-4, weight_sync__canary_bound=1e-3) for step in (1, 2, 3)]
    assert found_in(within)["weights"].fault is False
    for wrong in (2e-3, None):  # verl's file writes NaN as null
        beyond = [*within, row(4, weight_sync__canary_gap=wrong, weight_sync__canary_bound=1e-3)]
        found = recorded_causes(SETTINGS, False, beyond)[0]
        assert (found.cause, found.fault) == ("weights", True), "faults come first"
        assert "after 1 of 4 syncs, first at step 4" in found.seen
    assert "weights" not in found_in([row(1, weight_sync__canary_gap=1e-4)]), "there is no bound yet"


def test_staleness_has_its_share():
    first = row(1, mismatch__stale_fraction=0.0, mismatch__k3_kl=1e-6)
    second = row(2, mismatch__stale_fraction=0.5, mismatch__k3_kl=4e-6, **{"mismatch/behind_0/k3_kl": 1e-6})
    found = found_in([first, second])["staleness"]
    assert found.seen == "25.0% of the responses are behind; without them k3 is 75% smaller" and found.fault is None
    assert found_in([first])["staleness"].fault is False


def test_shadow_and_routing():
    shadow = {"actor__phantom__beta_abs_mean": 1e-3, "actor__phantom__alpha_abs_mean": 2e-4}
    found = found_in([row(1, **shadow, mismatch__routing_agreement=0.98)])
    assert found["trainer_precision"].seen == "fp16, by the config; the shadow: precision 1.0e-03 nats, policy 2.0e-04"
    assert found["routing"].seen == "2.00% of the choices differ"


def test_the_whole_gap():
    assert "has not measured its mismatch" in gap_of([row(1)])
    rows = [row(1, mismatch__k3_kl=1e-6), row(2, mismatch__k3_kl=3e-6, mismatch__log_prob_gap_abs_mean=1e-3)]
    assert gap_of(rows) == "Steps 1 to 2: k3 2.00e-06 on average, 3.00e-06 at the last step; mean |gap| 1.00e-03 nats."


@pytest.fixture
def run_folder(tmp_path, root):
    """Return the folder of a run with a config: Hydra's copy of a small one."""
    folder = tmp_path / "run"
    shutil.copytree(root / "tests" / "data" / "quickstart" / "fp16", folder)
    text = """
trainer: {device: cpu}
algorithm: {adv_estimator: grpo}
critic: {enable: false}
data: {train_files: [prompts.jsonl], max_response_length: 64}
actor_rollout_ref:
  model: {path: "tiny:qwen3", use_remove_padding: true}
  rollout: {name: vllm, dtype: half, temperature: 1.0, top_p: 0.8, top_k: -1, enable_prefix_caching: false}
  actor: {strategy: fsdp2, use_kl_loss: false, ppo_max_token_len_per_gpu: 256, fsdp_config: {
    _target_: verl_precision.integration.engine.engine_config.PrecisionFSDPConfig,
    mixed_precision: {param_dtype: fp16}}}
"""
    config = folder / "hydra" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(text)
    return folder


def test_a_run_folder(run_folder, typed):
    code, said = typed("explain", "--run", run_folder)
    assert code == 0, said
    assert "Steps 1 to 10: k3 1.04e-08 on average" in said
    assert "Something is wrong. sampling: top-p or top-k leaves tokens out" in said
    assert "sampling: +sampling_masks=replay" in said, "the remedy"
    assert "A rerun tells the share of each cause (decode, batch, rollout_precision, engine, trainer_precision" in said
    assert "verl-precision explain --rollout-dtype fp16 --train-dtype fp16 --top-p 0.8 --packed" in said
    assert "--packed --micro-batch-tokens 256 --prompts prompts.jsonl --max-prompts 16" in said
    assert sorted(path.name for path in run_folder.iterdir()) == ["hydra", "metrics.jsonl"], "nothing is written"


def test_the_tokens_that_a_run_kept_are_computed_again(run_folder, typed):
    """Those of the model's own weights; later ones need the weights of their step."""
    path = run_folder / "kept_tokens"
    append(path, [response(1, version=0), response(2, version=1), response(3, version=2)])
    _, said = typed("explain", "--run", run_folder)
    assert f"--packed --micro-batch-tokens 256 --tokens {path} --step 1" in said and "--prompts" not in said
    assert "Kept tokens of steps 2 to 3 were sampled with later weights" in said
    shutil.rmtree(path)
    append(path, [response(2, version=1)])
    _, said = typed("explain", "--run", run_folder)
    assert "--tokens" not in said and "--prompts prompts.jsonl" in said and "steps 2 to 2 were sampled" in said


def test_metrics_beside_the_checkpoints_of_a_run(run_folder, tmp_path, typed):
    """As recipes/launch/run.sh leaves them: PROJECT/EXPERIMENT.jsonl, and PROJECT/EXPERIMENT/run.yaml."""
    from verl_precision.integration.trainer.run_settings import _flat

    config = OmegaConf.to_container(OmegaConf.load(run_folder / "hydra" / ".hydra" / "config.yaml"))
    checkpoints = tmp_path / "project" / "experiment-1.5b"
    checkpoints.mkdir(parents=True)
    record = {"settings": dict(_flat(config, "")), "chosen": [], "content": {}, "digest": "0" * 8}
    (checkpoints / "run.yaml").write_text(json.dumps(record))
    metrics = shutil.copy(run_folder / "metrics.jsonl", checkpoints.parent / "experiment-1.5b.jsonl")
    by_folder, by_file = (typed("explain", "--run", path) for path in (checkpoints, metrics))
    assert by_folder == by_file
    assert "Something is wrong. sampling" in by_folder[1]


def test_a_run_without_config(root, typed):
    code, said = typed("explain", "--run", root / "tests" / "data" / "quickstart" / "fp16" / "metrics.jsonl")
    assert code == 0
    assert "Nothing that is recorded is wrong." in said
    assert "It has left no config." in said and "verl-precision explain --recipe RECIPE.yaml" in said


@pytest.mark.parametrize(("arguments", "words"), [
    (("--run", "nowhere"), "no such file or folder"),
    (("--run", "tests/data/quickstart"), "there are several runs in it. Allowed: one run. Name one of bf16, fp16"),
    (("--run", "tests/data/quickstart/fp16", "--top-p", "1"), "Leave out --top-p"),
    (("--run", "tests/data/quickstart/fp16", "--recipe", "recipes/quickstart/quickstart.yaml"), "Leave one out"),
    (("precision=bf16",), "Leave one out"),
])  # fmt: skip
def test_what_cannot_be_asked(arguments, words, monkeypatch, root, typed):
    monkeypatch.chdir(root)
    code, said = typed("explain", *arguments)
    assert code != 0 and words in said.replace("│ ", "").replace(" │", "")
