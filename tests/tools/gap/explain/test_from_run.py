"""A recipe's config gives the settings of an explanation; a run tells which command to ask."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from cases import cases
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.tools.checking.composing import compose_recipe
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.from_run import explained_by
from verl_precision.tools.jobs.settings import Explanation

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart" / "quickstart.yaml"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def quickstart():
    return compose_recipe(RECIPE, ["precision=bf16"])


def changed(config, *dotlist):
    return OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config)), OmegaConf.from_dotlist(list(dotlist)))


@pytest.mark.parametrize(("change", "name", "value"), cases(__file__, "settings"))
def test_settings_follow_the_config(quickstart, change, name, value):
    assert explained_by(changed(quickstart, *change.split()))[name] == value


@pytest.mark.parametrize("change", ["actor_rollout_ref.actor.strategy=megatron", f"{ROLLOUT}.name=sglang"])
def test_another_engine_is_refused(quickstart, change):
    setting, _, value = change.partition("=")
    with pytest.raises(ConfigurationError, match=f"{setting}='{value}'.*Allowed: .*to explain the model alone"):
        explained_by(changed(quickstart, change))


def test_options_give_the_settings_back(quickstart, monkeypatch, tmp_path, at_root, typed):
    """The command that is printed asks for what the recipe asks for, and so does --recipe."""
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


@pytest.fixture
def run_folder(tmp_path, root, quickstart):
    """Return the folder of a run with a config: Hydra's copy."""
    folder = tmp_path / "run"
    shutil.copytree(root / "tests" / "data" / "quickstart" / "fp16", folder)
    config = folder / "hydra" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    OmegaConf.save(changed(quickstart, f"{ROLLOUT}.top_p=0.8", "data.train_files=[prompts.jsonl]"), config)
    return folder


def test_a_run_folder(run_folder, typed):
    code, said = typed("explain", "--run", run_folder)
    assert code == 0, said
    assert "the share of each cause (sampling, cache, decode, batch, rollout_precision, engine, trainer_prec" in said
    assert "--top-p 0.8 --prefix-caching --packed --micro-batch-tokens 256 --prompts prompts.jsonl" in said
    assert sorted(path.name for path in run_folder.iterdir()) == ["hydra", "metrics.jsonl"], "nothing is written"


def test_metrics_beside_the_checkpoints_of_a_run(run_folder, tmp_path, typed):
    """As recipes/launch/run.sh leaves them: PROJECT/EXPERIMENT.jsonl, and PROJECT/EXPERIMENT/run.yaml."""
    from verl_precision.integration.trainer.run_identity import _flat

    config = OmegaConf.to_container(OmegaConf.load(run_folder / "hydra" / ".hydra" / "config.yaml"))
    checkpoints = tmp_path / "project" / "experiment-1.5b"
    checkpoints.mkdir(parents=True)
    record = {"settings": _flat(config), "chosen": [], "content": {}, "digest": "0" * 8}
    (checkpoints / "run.yaml").write_text(json.dumps(record))
    metrics = shutil.copy(run_folder / "metrics.jsonl", checkpoints.parent / "experiment-1.5b.jsonl")
    code, said = typed("explain", "--run", metrics)
    assert code == 0 and "--top-p 0.8 --prefix-caching" in said, said


def test_a_run_without_config(root, typed):
    code, said = typed("explain", "--run", root / "tests" / "data" / "quickstart" / "fp16" / "metrics.jsonl")
    assert code == 0
    assert "This run has no config." in said and "verl-precision explain --recipe RECIPE.yaml" in said


@pytest.mark.parametrize(("arguments", "words"), cases(__file__, "refused"))
def test_what_cannot_be_asked(arguments, words, at_root, typed):
    code, said = typed("explain", *arguments)
    assert code != 0 and words in said.replace("│ ", "").replace(" │", "")
