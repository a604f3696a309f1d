"""`verl-precision check CONFIG`: every preset passes; table, JSON and exit codes."""

import json
from pathlib import Path

import pytest
from cases import cases
from composer import compose_recipe

from verl_precision.check.preflight import PreflightCallback
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.cli.verb import console
from verl_precision.presets import preset_names
from verl_precision.tools.checking.recipe_config import check_recipe, dtype_table

RECIPE = "recipes/quickstart/quickstart.yaml"
PRECISIONS = preset_names("precision")
pytestmark = pytest.mark.usefixtures("at_root")


def errors(config) -> list[str]:
    return [str(fault) for fault in find_faults(config, Environment()) if fault.severity == "error"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_table_says_what_the_preset_says(precision):
    config = compose_recipe(RECIPE, f"precision={precision}", "critic.enable=True")
    rows = {row.what: row.value for row in dtype_table(config)}
    train, _, rollout = precision.partition("_train_")
    rollout = rollout.removesuffix("_rollout") or train
    assert errors(compose_recipe(RECIPE, f"precision={precision}", return_hydra_config=True)) == []
    assert rows["actor forward"] == rows["critic forward"] == train
    assert rows["actor master weights, Adam"] == rows["actor gradient reduction"] == "fp32"
    assert rows["rollout"] == rollout and rows["weights to the rollout"] == "fp32"


@pytest.mark.parametrize(("rollout", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_stochastic_rounding_reaches_the_engine(rollout, dtype):
    precision = f"precision=fp32_train_{rollout}_rollout"
    config = compose_recipe(RECIPE, precision, "weight_sync.rounding=stochastic", return_hydra_config=True)
    assert errors(config) == []
    assert {row.what: row.value for row in dtype_table(config)}["weights to the rollout"] == rollout
    assert config.actor_rollout_ref.actor.fsdp_config.stochastic_rounding_to == rollout
    assert config.actor_rollout_ref.rollout.dtype == dtype
    config = compose_recipe(RECIPE, precision)
    assert config.actor_rollout_ref.actor.fsdp_config.stochastic_rounding_to is None, "nearest by default"


def test_json_schema_and_exit_codes(typed):
    code, text = typed("check", RECIPE, "actor_rollout_ref.rollout.dtype=bfloat16", "--json")
    content = json.loads(text)
    assert code == 1 and content["ok"] is False, text
    assert all(set(row) == {"what", "dtype", "source"} for row in content["dtypes"])
    first = content["findings"][0]
    assert set(first) == {"name", "severity", "setting", "value", "problem", "allowed", "remedy"}
    assert first["name"] == "rollout-contradicts-actor" and first["severity"] == "error"


def test_terminal_shows_table_finding_and_remedy(typed, monkeypatch):
    monkeypatch.setattr(console, "width", 120)
    code, text = typed("check", RECIPE, "actor_rollout_ref.rollout.top_p=0.9", "--gpu", "A100")
    assert code == 0, text
    assert "actor forward fp16" in text and "rollout fp16" in text
    assert "warn truncated-sampling: actor_rollout_ref.rollout.top_p=0.9" in text
    assert "Set actor_rollout_ref.rollout.top_p=1.0" in text and "0 error(s)" in text


@pytest.mark.parametrize(("arguments", "words"), cases(__file__, "mistakes"))
def test_a_mistake_is_answered_with_the_word_to_write(typed, arguments, words):
    code, text = typed("check", *arguments.split())
    assert code == 1 and words in text and "earch path" not in text and "Lexer" not in text


@pytest.mark.parametrize(("content", "words"), cases(__file__, "own YAML"))
def test_a_users_own_yaml_is_never_a_traceback(typed, content, words, tmp_path):
    (tmp_path / "mine.yaml").write_text(content)
    code, text = typed("check", tmp_path / "mine.yaml", "--json")
    found = json.loads(text)
    (fault,) = found["findings"]
    said = " ".join([f"{fault['setting']}={fault['value']!r}:", f"{fault['problem']}.", fault["remedy"]])
    assert code == 1 and found["ok"] is False and fault["severity"] == "error" and words in said.replace("..", ".")
    assert fault["setting"] or "mine.yaml" in said or "main_ppo" in said


def test_a_misspelt_name_that_hydra_adds_is_a_warning_and_a_name_of_ones_own_none(typed, tmp_path):
    """Behind a +, or in a recipe's own YAML."""
    slips = {"trainer.save_frq": "save_freq", "data.max_response_lenght": "max_response_length"}
    own = ["actor_rollout_ref.rollout.engine_kwargs.vllm.max_nu_seqs", "trainer.my_own", "data.train_file_of_mine"]
    found = check_recipe(Path(RECIPE), [f"+{name}=3" for name in (*slips, *own)]).faults
    said = {fault.setting: fault.remedy for fault in found if fault.name == "setting-ignored"}
    assert said == {slip: f"Did you mean {slip.partition('.')[0]}.{meant}?" for slip, meant in slips.items()}
    written = Path(RECIPE).read_text().replace("\ntrainer:\n", "\ntrainer:\n  save_frq: 3\n")
    (tmp_path / "mine.yaml").write_text(written)
    code, text = typed("check", tmp_path / "mine.yaml")
    assert code == 0 and "Did you mean trainer.save_freq?" in text, text


def test_the_folder_of_checkpoints_is_named_as_the_run_names_it(typed):
    sanity = "recipes/sanity/sanity.yaml"
    config = compose_recipe(sanity, return_hydra_config=True)
    PreflightCallback().on_run_start(config)
    assert config.trainer.experiment_name.startswith("fp16_pg_seq_is-")
    _, text = typed("check", sanity)
    assert f"checkpoints in {config.trainer.default_local_dir} " in text
    assert check_recipe(Path(RECIPE), []).folder is None, "it saves nothing"


MOE = "recipes/moe/moe.yaml"


@pytest.mark.parametrize(("overrides", "told"), [
    ("model_engine=megatron", set()),
    ("model_engine=megatron scale=2x8_h100 precision=bf16 +router_replay=rollout", set()),
    ("actor_rollout_ref.rollout.name=sglang", {("warning", "rollout-unverified")}),
])  # fmt: skip
def test_other_engines_and_rollouts_hold_or_are_told_by_name(overrides, told):
    faults = check_recipe(Path(MOE), overrides.split()).faults
    assert {(fault.severity, fault.name) for fault in faults if fault.severity != "unchecked"} == told, faults


def test_who_decides_each_dtype_of_megatron():
    rows = {row.what: row for row in check_recipe(Path(MOE), ["model_engine=megatron"]).rows}
    actor = "actor_rollout_ref.actor.megatron"
    assert rows["actor forward"][1:] == ("fp16", f"{actor}.dtype")
    assert rows["actor master weights, Adam"][1:] == ("fp32", "Megatron's optimizer")
    assert rows["actor gradient reduction"].value == "fp32" and rows["weights to the rollout"].value == "fp16"


@pytest.mark.parametrize("engine", ["veomni", "torchtitan"])
def test_presets_of_precision_are_refused_with_an_engine_that_has_none(typed, engine):
    code, text = typed("check", MOE, f"model_engine={engine}", "precision=bf16")
    assert code == 1 and f"model_engine={engine!r}: presets that set a dtype" in text and "model_engine=dp" in text
