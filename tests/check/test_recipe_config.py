"""`verl-precision check CONFIG`: every preset passes; table, JSON and exit codes."""

import json

import pytest
from typer.testing import CliRunner

from verl_precision.base.dtypes import short
from verl_precision.check.recipe_config import check_recipe, table
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.cli import app
from verl_precision.presets import preset_names

RECIPE = "recipes/quickstart/quickstart.yaml"
PRECISIONS = preset_names("precision")


@pytest.fixture(autouse=True)
def _at_root(root, monkeypatch):
    monkeypatch.chdir(root)


def check(*arguments: str):
    done = CliRunner().invoke(app, ["check", *arguments])
    return done.exit_code, " ".join(done.output.split())


def errors(config) -> list[str]:
    return [str(fault) for fault in find_faults(config, Environment()) if fault.severity == "error"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_passes_on_verls_own_config(compose_verl, precision):
    """Estimators: tests/presets/test_presets.py. Both on a recipe: tests/recipes/test_recipes.py."""
    overrides = [f"+precision={precision}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm"]
    assert errors(compose_verl(*overrides, return_hydra_config=True)) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_table_says_what_the_preset_says(precision, compose_recipe):
    config = compose_recipe(RECIPE, f"precision={precision}", "critic.enable=True")
    rows = {row.what: row.dtype for row in table(config)}
    train, _, rollout = precision.partition("_train_")
    rollout = rollout.removesuffix("_rollout") or train
    assert rows["actor forward"] == rows["critic forward"] == train
    assert rows["actor master weights, Adam"] == rows["actor gradient reduction"] == "fp32"
    assert rows["rollout"] == rollout and rows["weights to the rollout"] == "fp32"


@pytest.mark.parametrize(("rollout", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_stochastic_rounding_reaches_the_engine(rollout, dtype, compose_recipe):
    precision = f"precision=fp32_train_{rollout}_rollout"
    config = compose_recipe(RECIPE, precision, "weight_sync.rounding=stochastic", return_hydra_config=True)
    assert errors(config) == []
    assert {row.what: row.dtype for row in table(config)}["weights to the rollout"] == rollout
    assert config.actor_rollout_ref.actor.fsdp_config.stochastic_rounding_to == rollout
    assert config.actor_rollout_ref.rollout.dtype == dtype
    config = compose_recipe(RECIPE, precision)
    assert config.actor_rollout_ref.actor.fsdp_config.stochastic_rounding_to is None, "nearest by default"


def test_json_schema_and_exit_codes():
    done = CliRunner().invoke(app, ["check", RECIPE, "actor_rollout_ref.rollout.dtype=bfloat16", "--json"])
    assert done.exit_code == 1, done.output
    content = json.loads(done.stdout)
    assert content["ok"] is False
    assert all(set(row) == {"what", "dtype", "source"} for row in content["dtypes"])
    first = content["findings"][0]
    assert set(first) == {"name", "severity", "setting", "value", "problem", "allowed", "remedy"}
    assert first["name"] == "rollout-contradicts-actor" and first["severity"] == "error"


def test_terminal_shows_table_finding_and_remedy():
    code, text = check(RECIPE, "actor_rollout_ref.rollout.top_p=0.9", "--gpu", "A100")
    assert code == 0, text
    assert "actor forward fp16" in text and "rollout fp16" in text
    assert "warn truncated-sampling: actor_rollout_ref.rollout.top_p=0.9" in text
    assert "Set actor_rollout_ref.rollout.top_p=1.0" in text and "0 error(s)" in text


@pytest.mark.parametrize(("arguments", "words"), [
    (["nowhere.yaml"], "nowhere.yaml: no such recipe"),
    ([RECIPE, "precision=fp61"], "precision/fp61"),
    ([RECIPE, "actor_rollout_ref.rolout.dtype=half"], "rolout"),
    ([RECIPE, "--gpu", "B2000"], "--gpu B2000: no GPU of this name is known"),
    ([RECIPE, "--gpu", "B2000"], "B200, GB200, H100"),
])  # fmt: skip
def test_what_cannot_be_checked_is_refused_with_the_reason(arguments, words):
    code, text = check(*arguments)
    assert code == 1 and words in text


def test_this_machine_is_a_warning_and_the_config_an_error(root):
    overrides = ["data.train_files=nowhere.parquet", "estimator=pg_seq_tis"]
    report = check_recipe(root / RECIPE, overrides)
    (fault,) = [fault for fault in report.faults if fault.name == "files-missing"]
    assert report.ok and fault.severity == "warning" and fault.setting == "data.train_files"
    report = check_recipe(root / RECIPE, [*overrides, "algorithm.rollout_correction.bypass_mode=False"])
    assert not report.ok and "loss-settings" in [fault.name for fault in report.faults]


def test_spellings_of_dtypes():
    spelled = {"bf16": ["bfloat16"], "fp16": ["float16", "half", "16", 16], "fp32": ["float"], "auto": ["auto"]}
    assert {name: {short(value) for value in values} for name, values in spelled.items()} == {n: {n} for n in spelled}
