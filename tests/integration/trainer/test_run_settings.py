"""Two runs are the same exactly if they learn alike: by settings, and by the content of their files."""

import dataclasses
import functools
import shutil

import pytest
from composer import compose_recipe, compose_verl
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.trainer import run_identity
from verl_precision.integration.trainer.run_identity import RunSettings, changed_settings, differences

SANITY = "recipes/sanity/sanity.yaml"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model.path"


def run_of(*overrides):
    return RunSettings.from_config(compose_recipe(SANITY, *overrides))


@functools.cache
def plain_run():
    return run_of()


def recorded(run):
    return RunSettings.from_record(run.as_record())


NAMES = st.deferred(lambda: st.sampled_from(sorted(plain_run().settings)))


def test_verls_own_yaml_is_what_hydra_composes():
    composed = run_identity._parts(compose_verl(), resolve=False)
    assert run_identity._flat(composed) == run_identity._defaults_of_verl("dp")


def test_of_verl_alone_nothing_is_chosen_but_what_it_wants_to_be_told():
    assert RunSettings.from_config(compose_verl(f"{ROLLOUT}.name=vllm")).chosen == [f"{ROLLOUT}.name"]


@settings(max_examples=20)
@given(name=NAMES)
def test_a_setting_that_is_given_the_value_it_has_changes_nothing(name):
    config, before = compose_recipe(SANITY), plain_run()
    OmegaConf.update(config, name, before.settings[name], force_add=True)
    run = RunSettings.from_config(config)
    assert run.digest == before.digest and changed_settings(recorded(before), run) == []


@given(gone=st.sets(NAMES), other=st.sets(NAMES))
def test_only_a_chosen_setting_that_one_version_does_not_know_makes_another_run(gone, other):
    """A newer verl has settings more, an older one fewer; here, any."""

    def without(run, names):
        return dataclasses.replace(run, settings={k: v for k, v in run.settings.items() if k not in names})

    run = plain_run()
    old, new = without(recorded(run), gone), without(run, other)
    assert {*changed_settings(old, new)} == (gone ^ other) & {*run.chosen}


@pytest.mark.parametrize(("setting", "value", "same"), [
    (f"{ROLLOUT}.of_the_next_verl", None, True),
    (f"{ROLLOUT}.of_the_next_verl", [], True),
    (f"{ROLLOUT}.of_the_next_verl", 1, False),
    (f"{ACTOR}.fsdp_config.watch_routing", False, False),  # not in verl's YAML
    (f"{ROLLOUT}.temperature", 1, True),  # 1.0
    (f"{ROLLOUT}.of_the_next_verl.enable_prefix_caching", False, True),
])  # fmt: skip
def test_a_new_setting_counts_if_it_has_another_value_than_its_default(setting, value, same):
    config = compose_recipe(SANITY)
    OmegaConf.update(config, setting, value, force_add=True)
    run = RunSettings.from_config(config)
    assert changed_settings(recorded(plain_run()), run) == ([] if same else [setting])
    assert (run.digest == plain_run().digest) == same


@pytest.fixture
def files(tmp_path):
    """Data, a reward and a model, each in its file; and a run that names them."""
    (tmp_path / "model").mkdir()
    texts = {"data.jsonl": "{}", "reward.py": "a = 1", "model/config.json": "{}", "model/model.safetensors": "weights"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_in(folder):
    reward = f"reward.custom_reward_function.path={folder}/reward.py"
    return run_of(f"data.train_files=[{folder}/data.jsonl]", reward, f"{MODEL}={folder}/model")


@pytest.mark.parametrize(("changed", "setting"), [
    ("data.jsonl", "data.train_files"),
    ("reward.py", "reward.custom_reward_function.path"),
    ("model/model.safetensors", MODEL),
    ("model/config.json", MODEL),
    ("model/README.md", None),
])  # fmt: skip
def test_another_content_at_one_path_is_another_run(files, changed, setting):
    old = run_in(files)
    (files / changed).write_text("changed")
    new = run_in(files)
    assert changed_settings(old, new) == ([setting] if setting else [])
    assert (new.digest == old.digest) == (setting is None)
    assert setting is None or "has changed its content" in differences(old, new)


def test_the_same_content_elsewhere_is_the_same_run(files, tmp_path_factory):
    old, moved = run_in(files), tmp_path_factory.mktemp("elsewhere") / "files"
    shutil.move(files, moved)
    new = run_in(moved)
    assert new.digest == old.digest and changed_settings(RunSettings.from_record(old.as_record()), new) == []


def test_what_cannot_be_read_is_named(files):
    (files / "model" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigurationError, match=rf"{MODEL}='.*': a file that it names cannot be read"):
        run_in(files)
