"""Keys that verl does not have, or does not read: each with today's name, which is verl's own config's."""

import functools
import re

import pytest
from cases import cases
from composer import compose_verl
from omegaconf import OmegaConf

from verl_precision.check.keys import TABLE_OF_KEYS, keys_of
from verl_precision.check.preflight import PreflightCallback
from verl_precision.tools.checking.words import HANDED_ON, unknown

ENGINES = ("dp", "megatron", "veomni", "torchtitan")
READY = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=8")
READY += tuple(f"actor_rollout_ref.{each}use_dynamic_bsz=True" for each in ("actor.", "rollout.log_prob_"))
ON_GPUS = ("--gpu", "H100", *READY)


@functools.cache
def known(engine: str = "dp") -> frozenset[str]:
    config = compose_verl(f"model_engine={engine}")
    return frozenset(keys_of(OmegaConf.to_container(config, resolve=False)))


@pytest.mark.parametrize(("old", "new"), [*TABLE_OF_KEYS["moved"].items(), *TABLE_OF_KEYS["unread"].items()])
def test_todays_name_is_in_verls_config_of_an_engine_that_lacks_the_old_one(old, new):
    is_there = [engine for engine in ENGINES if new in known(engine) or HANDED_ON.search(f"{new}.")]
    assert is_there, f"{new} is nowhere"
    if old in TABLE_OF_KEYS["unread"]:
        assert old in known()
    else:
        assert any(old not in known(engine) for engine in is_there)


@pytest.mark.parametrize("old", [*TABLE_OF_KEYS["replaced"], *TABLE_OF_KEYS["gone"]])
def test_a_key_without_a_name_of_today_is_gone_and_the_words_name_what_there_is(old):
    every = [key for engine in ENGINES for key in known(engine)]
    if old.startswith("*."):
        missing = [all(not key.endswith(old[1:]) for key in known(engine)) for engine in ENGINES]
        assert any(missing), f"{old} is there"
    elif old not in ("reward_model",):  # a block of which the rest is `unread`
        assert old not in every
    words = {**TABLE_OF_KEYS["replaced"], **TABLE_OF_KEYS["gone"]}[old]
    named = re.findall(r"(?:actor_rollout_ref|algorithm|critic|data|reward|trainer|global_profiler)(?:\.\w+)+", words)
    assert set(named) <= set(every)


@pytest.mark.parametrize(("key", "engine", "said"), cases(__file__, "keys"))
def test_a_key_is_answered_with_todays_word_of_the_commands_engine(key, engine, said):
    error = unknown(key, "1", known(engine))
    assert said in error.remedy and error.setting == key
    assert "+" not in error.remedy or HANDED_ON.search(f"{key}.") or "reward_kwargs" in error.remedy
    if error.remedy.startswith("Write data."):
        assert unknown(key, "null", known(engine)).remedy == "Drop it."  # verl compares today's with 0


def test_every_unknown_key_is_named_at_once(findings):
    wrong = {"data.val_data_num": "-1", "max_turns": "4", "trainer.save_frq": "5", "algorithm.no_think_rl": "False"}
    words = [f"{key}={value}" for key, value in wrong.items()]
    words += ["~trainer.nothing", "+trainer.val_only=False", "+reward_model.reward_kwargs.max_resp_len=5"]
    code, found = findings(*ON_GPUS, *words, "reward_model.reward_manager=dapo", "+precision=fp16")
    said = {each["setting"]: each["remedy"] for each in found}
    assert code == 1 and len(found) == len(said)
    assert set(said) >= {*wrong, "trainer.nothing", "trainer.val_only", "reward_model.reward_kwargs.max_resp_len"}
    assert said["reward_model.reward_kwargs.max_resp_len"] == "Write +reward.reward_kwargs.max_resp_len=5."
    assert said["reward_model.reward_manager"] == "Write reward.reward_manager.name=dapo."
    assert {each["name"] for each in found} == {"unknown-key"}


@pytest.mark.parametrize(("word", "said"), cases(__file__, "added for nobody"))
def test_what_a_plus_adds_for_nobody_is_named_once(findings, word, said):
    code, found = findings(*ON_GPUS, word)
    (fault,) = [each for each in found if each["name"] in ("unknown-key", "verl-refuses", "setting-ignored")]
    assert (code, fault["name"], fault["severity"]) == (1, "unknown-key", "error") and said in fault["remedy"]


@pytest.mark.parametrize("word", cases(__file__, "added for somebody"))
def test_what_a_plus_adds_for_somebody_is_none(findings, word):
    assert not [each for each in findings(*ON_GPUS, word)[1] if each["name"] in ("unknown-key", "verl-refuses")]


@pytest.mark.parametrize("words", ["trainer.use_v1=False", "+rollout.nnodes=1 +rollout.n_gpus_per_node=8"])
def test_no_measuring_trainer_is_named_where_verl_starts_another(words):
    """And so no signal is caught that only that trainer would answer."""
    config = compose_verl(*READY, "+precision=fp16", *words.split(), return_hydra_config=True)
    PreflightCallback().on_run_start(config)
    assert config.trainer.v1.trainer_mode == "sync"
