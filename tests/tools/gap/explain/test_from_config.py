"""A recipe's config gives the settings of an explanation, and settings give the command."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_precision import cli
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.check.recipe_config import compose_recipe
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.from_run import explained_by, replays_sampling
from verl_precision.tools.gap.explain.settings import Explanation

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart" / "quickstart.yaml"


@pytest.fixture(scope="module")
def quickstart():
    return compose_recipe(RECIPE, ["precision=bf16"])


def changed(config, *dotlist):
    copy = OmegaConf.create(OmegaConf.to_container(config.copy(), resolve=False))
    for one in dotlist:
        name, _, value = one.partition("=")
        OmegaConf.update(copy, name, OmegaConf.from_dotlist([f"x={value}"]).x, force_add=True)
    return copy


def test_a_recipe(quickstart):
    settings = explained_by(quickstart)
    assert settings["model"].rpartition("/")[2].startswith("qwen3-")
    assert (settings["train_dtype"], settings["rollout_dtype"], settings["packed"]) == ("bf16", "bf16", True)
    assert settings["prompts"] == "recipes/quickstart/prompts.jsonl"
    assert (settings["cuda_graphs"], settings["attention"]) == (False, "sdpa"), "a CPU has neither"
    assert not replays_sampling(quickstart)


ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
ROLLOUT, FSDP = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
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
        (f"{FSDP}._target_=verl.workers.config.FSDPEngineConfig", "fp32_log_probs", False),
    ],
)
def test_settings_follow_the_config(quickstart, change, name, value):
    assert explained_by(changed(quickstart, *change.split()))[name] == value


@pytest.mark.parametrize("change", ["actor_rollout_ref.actor.strategy=megatron", f"{ROLLOUT}.name=sglang"])
def test_another_engine_is_refused(quickstart, change):
    setting, _, value = change.partition("=")
    with pytest.raises(ConfigurationError, match=f"{setting}='{value}'.*Allowed: ") as refused:
        explained_by(changed(quickstart, change))
    assert "Explain the model alone" in str(refused.value)


def test_options_give_the_settings_back(quickstart, monkeypatch, tmp_path, root):
    """The command that is printed asks for what the recipe asks for, and so does --recipe."""
    monkeypatch.chdir(root)
    asked = []

    def explain(job, console):
        asked.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "explain", explain)
    recipe = ["--recipe", "recipes/quickstart/quickstart.yaml", "precision=bf16"]
    options = as_options(Explanation, explained_by(quickstart))
    for arguments in (options, recipe, ["--top-p", "0.8", "--max-prompts", "2", *recipe]):
        result = CliRunner().invoke(cli.app, ["explain", "--output", str(tmp_path / "out"), *arguments])
        assert result.exit_code == 130, result.output
    (of_options, of_recipe, overridden) = asked
    assert of_options == of_recipe and of_recipe.max_prompts == 16
    assert overridden.top_p == 0.8 and overridden.max_prompts == 2, "an option goes before the recipe"
