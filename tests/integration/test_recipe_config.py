"""`verl-precision check CONFIG`: every preset and recipe passes; table, JSON and exit codes."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.errors import ConfigurationError
from verl_precision.integration.recipe_config import check_recipe, compose_recipe, table
from verl_precision.presets import preset_names
from verl_precision.rules.book import find_faults
from verl_precision.rules.dtypes import short
from verl_precision.rules.rule import Environment

RECIPE = "recipes/quickstart/quickstart.yaml"
runner = CliRunner()


@pytest.fixture(autouse=True)
def _at_root(root, monkeypatch):
    monkeypatch.chdir(root)


def test_every_recipe_passes(root):
    recipes = sorted(path for path in (root / "recipes").rglob("*.yaml") if path.parent.name != "launch")
    assert recipes
    for recipe in recipes:
        report = check_recipe(recipe, [], Environment())
        assert report.ok, [str(fault) for fault in report.faults]


@pytest.mark.parametrize(
    ("precision", "estimator"), list(itertools.product(preset_names("precision"), preset_names("estimator")))
)
def test_every_combination_of_presets_passes(compose_verl, precision, estimator):
    config = compose_verl(
        f"+precision={precision}",
        f"+estimator={estimator}",
        "actor_rollout_ref.rollout.name=vllm",
        return_hydra_config=True,
    )
    assert [str(f) for f in find_faults(config, Environment()) if f.severity == "error"] == []


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_table_says_what_the_preset_says(precision, root):
    config = compose_recipe(root / RECIPE, [f"precision={precision}", "critic.enable=True"])
    rows = {row.what: row.dtype for row in table(config)}
    train, _, rollout = precision.partition("_train_")
    rollout = rollout.removesuffix("_rollout") or train
    assert rows["actor forward"] == rows["critic forward"] == train
    assert rows["actor master weights, Adam"] == rows["actor gradient reduction"] == "fp32"
    assert rows["rollout"] == rollout and rows["weights to the rollout"] == "fp32"


def test_json_schema_and_exit_codes():
    good = runner.invoke(app, ["check", RECIPE, "--json"])
    assert good.exit_code == 0, good.output
    content = json.loads(good.stdout)
    assert content["ok"] is True
    assert all(set(row) == {"what", "dtype", "source"} for row in content["dtypes"])

    bad = runner.invoke(app, ["check", RECIPE, "actor_rollout_ref.rollout.dtype=bfloat16", "--json"])
    assert bad.exit_code == 1
    content = json.loads(bad.stdout)
    assert content["ok"] is False
    first = content["findings"][0]
    assert set(first) == {"name", "severity", "setting", "value", "problem", "allowed", "remedy"}
    assert first["name"] == "rollout-contradicts-actor" and first["severity"] == "error"


def test_terminal_shows_table_finding_and_remedy():
    done = runner.invoke(app, ["check", RECIPE, "actor_rollout_ref.rollout.top_p=0.9", "--gpu", "A100"])
    text = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    assert "actor forward fp16" in text and "rollout fp16" in text
    assert "warn truncated-sampling: actor_rollout_ref.rollout.top_p=0.9" in text
    assert "Set actor_rollout_ref.rollout.top_p=1.0" in text and "0 error(s)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such recipe"),
        ([RECIPE, "precision=fp61"], "precision/fp61"),
        ([RECIPE, "actor_rollout_ref.rolout.dtype=half"], "rolout"),
    ],
)
def test_what_does_not_compose_is_said_in_hydras_words(arguments, words):
    done = runner.invoke(app, ["check", *arguments])
    assert done.exit_code == 1
    assert words in " ".join(done.output.split())


def test_this_machine_is_a_warning_and_the_config_an_error(root):
    report = check_recipe(root / RECIPE, ["data.train_files=nowhere.parquet"], Environment())
    (fault,) = [fault for fault in report.faults if fault.name == "check_files"]
    assert report.ok and fault.severity == "warning" and fault.setting == "data.train_files"
    report = check_recipe(
        root / RECIPE, ["estimator=pg_seq_tis", "algorithm.rollout_correction.bypass_mode=False"], Environment()
    )
    assert not report.ok and "check_estimator" in [fault.name for fault in report.faults]


def test_a_missing_recipe_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="no such recipe"):
        compose_recipe(tmp_path / "x.yaml", [])


def test_spellings_of_dtypes():
    assert [short(v) for v in ("bfloat16", "float16", "half", "16", 16, "float", "auto")] == [
        *("bf16", "fp16", "fp16", "fp16", "fp16", "fp32", "auto")
    ]
