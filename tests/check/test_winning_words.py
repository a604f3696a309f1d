"""Every word that wins over a preset is named, and no other; `presets=win` puts the presets over them."""

import json
from pathlib import Path

import pytest
import yaml
from cases import cases
from composer import compose_recipe, compose_verl
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_precision.base.verl_config import leaves
from verl_precision.check.preflight import PreflightCallback
from verl_precision.check.rules.registry import find_faults, without_chosen
from verl_precision.check.rules.rule import Environment, Fault
from verl_precision.check.who_decides import let_presets_win, winning_words
from verl_precision.cli import app
from verl_precision.integration.trainer.run_identity import RUN_FILE
from verl_precision.presets import PRESETS_DIR, preset_groups, preset_names
from verl_precision.tools.checking.recipe_config import check_recipe, training_table

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
BASE = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n=8")
WORDS = yaml.safe_load(Path(__file__).with_name("winning_words.yaml").read_text())
DTYPES = {"half": "float16", "fp16": "float16"}


def spoken(group: str, name: str, package: str = "") -> dict:
    """Return what a preset's own file says, and those that it includes: a plain reading of the YAML."""
    text = (PRESETS_DIR / group / f"{name}.yaml").read_text()
    said = text.split("# @package ")[1].split()[0] if text.startswith("# @package ") else group
    prefix = "" if said == "_global_" else f"{said}."
    content, found = yaml.safe_load(text), {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            found |= spoken(*((f"{group}/{part}", value) for part, value in entry.items()).__next__())
        elif entry != "_self_":
            found |= spoken(*(entry.strip("/").rpartition("/")[::2] if "/" in entry else (group, entry)))
    return found | {prefix + key: value for key, value in leaves(content) if value != {}}


def composed(*words: str):
    return compose_verl(*BASE, *words, return_hydra_config=True)


def word(key: str, value: object) -> str:
    return f"{key}={'null' if value is None else value}"


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("group, name", [(group, name) for group in preset_groups() for name in preset_names(group)])
def test_what_a_preset_says_and_a_word_changes_is_named_and_nothing_else(group, name, number):
    """Some 1,800 pairs of preset and word."""
    given = {key: values[number] for key, values in WORDS.items()}
    config = composed(f"+{group}={name}", *(word(key, value) for key, value in given.items()))
    said, probe = spoken(group, name), composed(f"+{group}={name}")
    wanted = {key: OmegaConf.select(probe, key) for key in given if key in said}
    differs = lambda one, other: DTYPES.get(one, one) != DTYPES.get(other, other)  # noqa: E731
    off = (None, False)
    both_off = lambda one, other: one in off and other in off  # noqa: E731
    expected = {key for key, value in wanted.items() if differs(given[key], value) and not both_off(given[key], value)}
    found = winning_words(config)
    assert {each.setting for each in found} == expected
    for each in found:
        assert each.word == word(each.setting, given[each.setting]) and each.preset == f"{group}={name}"
        assert each.wanted == wanted[each.setting]


PG, FP16 = "+estimator=pg_seq_is", "+precision=fp16"


@pytest.mark.parametrize(("words", "setting", "severity", "effect"), [
    (f"{PG} algorithm.adv_estimator=grpo", "adv_estimator", "error", "which has rloo: another advantage"),
    (f"{PG} algorithm.use_kl_in_reward=True", "use_kl_in_reward", "warning", "KL term"),
    (f"{PG} {ACTOR}.entropy_coeff=0.01", "entropy_coeff", "warning", "entropy term"),
    (f"{PG} {ACTOR}.policy_loss.loss_mode=geo_mean", "loss_mode", "error", "which has vp_pg_seq_is"),
    (f"{PG} {ACTOR}.policy_loss={{loss_mode:vanilla}}", "loss_mode", "error", "another loss is trained"),
    (f"{PG} {ACTOR}.loss_agg_mode=token-mean", "loss_agg_mode", "warning", "get other weights"),
    (f"{PG} ~{ACTOR}.loss_scale_factor", "loss_scale_factor", "error", "padded width"),
    (f"{PG} {CORRECTION}.bypass_mode=False", "bypass_mode", "error", "which has True"),
    (f"{PG} {CORRECTION}.rollout_is=token", "rollout_is", "warning", "in bypass mode, which"),
    (f"+estimator=trm {CORRECTION}=null", "rollout_rs", "error", "which has seq_max_k3"),
    (f"+precision=fp16 ~{ROLLOUT}.engine_kwargs.vllm", "worker_extension_cls", "warning", "weight-sync guard is off"),
    (f"+precision=fp16 {ROLLOUT}.dtype=bfloat16", "rollout.dtype", "error", "the log-prob of every token"),
    (f"{FP16} ++{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16", "param_dtype", "error", "than the rest"),
    ("+repeatable=bitwise data.seed=1", "data.seed", "warning", "which has 0"),
    ("+learning_rate=effective_sample ++actor_rollout_ref.actor.fsdp_config.learning_rate_ess_base=null", "ess_base",
     "warning", "which has 1.0"),
])  # fmt: skip
def test_one_finding_says_what_wins_over_what_and_with_which_effect(words, setting, severity, effect):
    config = composed(*words.split())
    found = [fault for fault in find_faults(config, Environment()) if fault.setting.endswith(f"{setting}")]
    (fault,) = found
    assert fault.severity == severity and effect in fault.problem, fault
    assert "Leave out" in fault.remedy and ("+presets=win" in fault.remedy or "rollout_is" in setting)
    ours = {each.name for each in find_faults(config, Environment())} - {fault.name, "preset-overruled"}
    follow = {"setting-ignored", "bypass-clips-mismatch", "engine-settings", "rollout-contradicts-actor"}
    assert not ours & follow, "one finding for one cause"


@pytest.mark.parametrize("words", [
    f"{PG} {ACTOR}.use_kl_loss=False {ACTOR}.entropy_coeff=0.0 algorithm.adv_estimator=rloo",
    f"+precision=fp16 {ROLLOUT}.dtype=half {ACTOR}.fsdp_config.mixed_precision.param_dtype=float16",
    f"+estimator=grpo {CORRECTION}=null {ACTOR}.clip_ratio_low=0.20",
    f"+scale=8x8_h100 trainer.nnodes=2 {ROLLOUT}.gpu_memory_utilization=0.5 data.train_batch_size=64",
    f"+precision=fp16 {ACTOR}.fsdp_config.loss_scale.initial=1024 mismatch.alarm.on_alarm=stop",
    f"+estimator=grpo +presets=yield {CORRECTION}.bypass_mode=True {ACTOR}.use_kl_loss=True",
])  # fmt: skip
def test_what_agrees_is_an_option_or_is_meant_is_not_named(words):
    faults = find_faults(composed(*words.split()), Environment())
    assert "preset-overruled" not in {fault.name for fault in faults}


def test_a_recipes_own_word_is_the_recipes_decision(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [ppo_trainer, estimator: pg_seq_is, _self_]\nhydra: {searchpath: ['pkg://verl_precision.presets']}\n"
        "actor_rollout_ref: {actor: {use_kl_loss: True, entropy_coeff: 0.1}, rollout: {name: vllm}}\n"
    )
    report = check_recipe(recipe, [f"{ACTOR}.use_kl_loss=False"])
    assert not report.words and report.way_out is None
    who = {row.what: row.source for row in report.training}
    assert who["entropy"] == "mine.yaml" and who["loss"] == "estimator=pg_seq_is"
    assert who["KL in the loss"] == f"the command's {ACTOR}.use_kl_loss=False"


def test_of_two_presets_the_later_ones_value_counts():
    config = composed("+precision=fp16", "+scale=cpu", f"++{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=my.Ext")
    (found,) = [each for each in winning_words(config) if each.contradicts]
    assert found.preset == "precision=fp16", "which means it; the scale needs it too"


def test_the_presets_that_win_are_as_if_the_words_were_left_out():
    words = [f"{ACTOR}.policy_loss={{loss_mode:gpg}}", f"~{ACTOR}.loss_scale_factor", f"{CORRECTION}=null"]
    words += ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.dtype=bfloat16", f"{ACTOR}.clip_ratio_low=[1,2]"]
    presets = "+precision=fp16", "+estimator=grpo_token_tis", "+presets=win"
    config = composed(*presets, *words)
    replaced = let_presets_win(config)
    assert {each.word for each in replaced} == set(words) and winning_words(config) == []
    plain = composed(*presets)
    for block in ("actor_rollout_ref", "algorithm"):
        one, other = (OmegaConf.to_container(each[block], resolve=True) for each in (config, plain))
        kept = {key: other.get("rollout_correction", {}).get(key) for key in one.get("rollout_correction", {})}
        assert {**one, "rollout_correction": kept} == {**other, "rollout_correction": kept}
    assert {each["word"] for each in config.presets.replaced} == set(words)


def check(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


COMMAND = "env A=1 python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo"
COMMAND += f" {ACTOR}.use_kl_loss=True data.train_files=[a] +precision=fp16 {PG}"


def test_check_ends_with_the_command_that_does_what_the_presets_say(root, monkeypatch):
    monkeypatch.chdir(root)
    done = check("--json", "--", *COMMAND.split(), "trainer.project_name=two words")
    content = json.loads(done.stdout)
    way = content["way_out"]
    assert done.exit_code == 1 and way["leave_out"] == ["algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True"]
    assert way["command"].startswith("env A=1 python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm")
    assert way["command"].endswith(f"+precision=fp16 {PG} 'trainer.project_name=two words'")
    assert {row["what"]: row["value"] for row in content["training"]}["advantage"] == "grpo, divided by the group's std"
    assert {each["word"] for each in content["words_over_presets"]} == set(way["leave_out"])
    words = f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.entropy_coeff=0.2"  # the first would win where the last is left out
    done = check("recipes/quickstart/quickstart.yaml", "estimator=pg_seq_is", *words)
    last = "verl.trainer.main_ppo --config-dir recipes/quickstart --config-name quickstart estimator=pg_seq_is"
    assert f"The whole command: python -m {last}\n" in done.output and "entropy" in done.output


def test_words_over_a_scale_are_listed_and_are_no_finding():
    done = check(f"{ROLLOUT}.name=vllm", "+scale=8x8_h100", "trainer.nnodes=2", "algorithm.adv_estimator=grpo")
    assert "words over the scale: trainer.nnodes=2\n" in done.output and "preset-overruled" not in done.output


def test_each_key_that_a_typed_config_refuses_is_named_at_once():
    refused = f"{ACTOR}.foo", f"{ROLLOUT}.bar", f"{ACTOR}.policy_loss.baz", f"{ACTOR}.optim.eta"
    read = f"+{ROLLOUT}.engine_kwargs.vllm.mine=1", "+data.mine=1"
    done = check("--json", f"{ROLLOUT}.name=vllm", *(f"+{key}=1" for key in refused), *read)
    found = [each["setting"] for each in json.loads(done.stdout)["findings"] if each["name"] == "unknown-key"]
    assert found == [*refused]


def test_check_with_presets_that_win_says_each_replaced_word(root, monkeypatch):
    monkeypatch.chdir(root)
    done = check("--", *COMMAND.split(), "+presets=win")
    said = " ".join(done.output.split())
    assert "presets=win: algorithm.adv_estimator=grpo is replaced by rloo, of estimator=pg_seq_is" in said
    assert "preset-overruled" not in said and "leave out:" not in said


def test_a_word_that_adds_what_a_preset_has_is_answered_with_the_presets_value():
    mixed = f"+{ACTOR}.fsdp_config.mixed_precision"
    added = [f"{mixed}.reduce_dtype=fp32", f"{mixed}.param_dtype=bf16"]
    done = check(f"{ROLLOUT}.name=vllm", *added, "+precision=fp16")
    said = " ".join(done.output.split())
    assert "mixed_precision.param_dtype='bf16' precision=fp16 has it already, as fp16" in said
    assert all(f"Leave out {word}, or" in said for word in added) and "ppo_trainer.yaml has it" not in said


def test_who_decides_without_a_preset():
    rows = {row.what: row for row in training_table(composed(f"{ACTOR}.policy_loss.loss_mode=gpg"))}
    assert rows["loss"].value == "gpg" and rows["loss"].source == f"the command's {ACTOR}.policy_loss.loss_mode=gpg"
    assert rows["advantage"].source == "verl's default of algorithm.adv_estimator"
    assert rows["clip range"].value == "none: the loss does not clip"
    table = training_table(compose_recipe("recipes/sanity/sanity.yaml", "estimator=dapo"))
    rows = {row.what: row.value for row in table}
    assert rows["clip range"] == "0.2 below and 0.28 above, dual clip at 10.0" and rows["aggregation"] == "token-mean"


def test_a_run_starts_with_what_presets_say_and_keeps_what_they_replaced(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(root)
    monkeypatch.setenv("VERL_PLATFORM", "")
    words = "estimator=pg_seq_is", "algorithm.adv_estimator=grpo", "+presets=win", "trainer.save_freq=5"
    config = compose_recipe("recipes/quickstart/quickstart.yaml", *words, return_hydra_config=True)
    config.trainer.update(default_local_dir=str(tmp_path / "run"), max_actor_ckpt_to_keep=2)
    callback = PreflightCallback()
    callback.on_run_start(config)
    line = "verl_precision: presets=win: algorithm.adv_estimator=grpo is replaced by rloo, of estimator=pg_seq_is\n"
    assert line in capsys.readouterr().err and config.algorithm.adv_estimator == "rloo"
    monkeypatch.setattr("verl_precision.check.preflight.SignalRequests.listen", lambda self: None)
    monkeypatch.setattr("verl_precision.check.preflight.choose_name", lambda: None)
    callback.on_job_start(config)
    (kept,) = yaml.safe_load((tmp_path / "run" / RUN_FILE).read_text())["replaced_by_presets"]
    assert kept["word"] == "algorithm.adv_estimator=grpo" and kept["value"] == "rloo"


CHOSEN = OmegaConf.create({"hydra": {"runtime": {"choices": {"estimator": "pg_seq_is", "precision": "fp16"}}}})


@pytest.mark.parametrize(("remedy", "asks_for"), cases(__file__, "WORDS"))
def test_what_is_chosen_is_not_asked_for(remedy, asks_for):
    instead = f"Leave out a.b, or what else replaces a part of {asks_for}." if asks_for else remedy
    assert without_chosen(Fault("a.b", remedy=remedy), CHOSEN).remedy == instead
    assert without_chosen(Fault("a.b", remedy=remedy), OmegaConf.create()).remedy == remedy


def test_presets_win_beside_a_key_that_is_refused_is_no_fault():
    done = check("--json", f"{ROLLOUT}.name=vllm", PG, "+presets=win", f"{ACTOR}.no_such_key=1")
    found = json.loads(done.stdout)["findings"]
    assert [each["setting"] for each in found if each["name"] == "unknown-key"] == [f"{ACTOR}.no_such_key"]
