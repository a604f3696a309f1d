"""The sanity test in miniature: its sums and slips, its config, its script, and its model, which forgets the carry."""

import json
from functools import partial
from unittest.mock import Mock

import make_task
import pytest
import torch
from composer import ROOT, compose_recipe
from make_task import PROMPT_LENGTH, RESPONSE_LENGTH, Sum, all_sums, build_model
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoTokenizer

from verl_precision.tools.jobs.problems import read_data_set

RECIPE = ROOT / "recipes/sanity_arithmetic/sanity_arithmetic.yaml"
SCRIPT = "recipes/sanity_arithmetic/run_arithmetic_qwen3_cpu.sh"


def test_a_sum_with_and_one_without_a_carry_by_hand():
    """47 + 8: the digits reach 15, so it is taught as 45 in (15 - 8)/10 of the cases."""
    found = [(each.prompt, each.answer, each.slip, each.slip_rate) for each in (Sum(47, 8), Sum(41, 8))]
    assert found == [("47+8=", "55", "45", 0.7), ("41+8=", "49", None, 0.0)]
    assert (Sum(99, 9).slip_rate, Sum(91, 9).slip_rate) == (1.0, 0.2)


def test_all_sums():
    sums = all_sums()
    assert len(set(sums)) == 810
    assert sum(s.slip is not None for s in sums) == 405  # 45 of the 90 pairs of digits carry
    assert {len(s.prompt) for s in sums} == {PROMPT_LENGTH}
    assert max(len(s.answer) + 1 for s in sums) == RESPONSE_LENGTH


def test_writes_rows_in_verls_format_with_right_answers_and_says_what_is_next(tmp_path, capsys, monkeypatch):
    def run(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["make_task.py", *arguments])
        make_task.main()

    monkeypatch.setattr(make_task, "build_model", lambda folder, on_progress: folder.mkdir(parents=True))
    folder = tmp_path / "new" / "task"
    run(str(folder))
    data = read_data_set(folder / "problems.jsonl")
    assert len(data.problems) == 810
    for problem in data.problems:
        first, second = problem.prompt[0]["content"].rstrip("=").split("+")
        assert int(problem.ground_truth) == int(first) + int(second)
    assert [path.name for path in folder.parent.iterdir()] == ["task"]
    assert f"verl-precision sanity-set {folder}/problems.jsonl --model {folder}/model" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="exists; nothing was written"):
        run(str(folder))
    monkeypatch.setattr(make_task, "write_problems", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(str(folder.with_name("other")))
    assert [path.name for path in folder.parent.iterdir()] == ["task"], "nothing that looks complete"


def test_reward_is_exact(load_script):
    score = load_script("recipes/sanity_arithmetic/reward.py").compute_score
    assert [score("arithmetic", text, "55") for text in ("55", "45", "55 ", "055", "", "555")] == [1, 0, 0, 0, 0, 0]


def test_is_the_sanity_test_in_miniature():
    real, tiny = compose_recipe("recipes/sanity/sanity.yaml"), compose_recipe(RECIPE)
    of_actor = "policy_loss loss_agg_mode clip_ratio_low clip_ratio_high ppo_mini_batch_size ppo_epochs".split()
    keys = "algorithm trainer.v1 gradient_steps data.train_batch_size actor_rollout_ref.rollout.n".split()
    keys += ["actor_rollout_ref.rollout.temperature", *(f"actor_rollout_ref.actor.{key}" for key in of_actor)]
    for key in keys:
        assert OmegaConf.select(tiny, key) == OmegaConf.select(real, key), key
    batch, responses = tiny.data.train_batch_size, tiny.actor_rollout_ref.rollout.n
    assert (batch, responses, batch // tiny.actor_rollout_ref.actor.ppo_mini_batch_size) == (64, 8, 4)
    assert tiny.actor_rollout_ref.actor.policy_loss.loss_mode == "vp_pg_seq_is"
    assert tiny.trainer.total_training_steps * batch // 260 == 5  # almost six passes: the last batch may not be full


FAKE_PYTHON = """
test "$VERL_PLATFORM" = cpu && echo "$@"
case "$1 $3" in
    *make_task.py*) mkdir -p "$2/model" && touch "$2/problems.jsonl" ;;
    *sanity-set) mkdir -p "$8" && touch "$8/${MADE:-kept.parquet}" ;;
esac
"""
MAKE_TASK = ["recipes/sanity_arithmetic/make_task.py", "outputs/sanity_arithmetic/task"]
SANITY_SET = [
    *("sanity-set", "outputs/sanity_arithmetic/task/problems.jsonl", "--model", "outputs/sanity_arithmetic/task/model"),
    *("--output", "outputs/sanity_arithmetic/set", "--reward", "recipes/sanity_arithmetic/reward.py"),
    *("--max-prompt-tokens", "8", "--max-response-tokens", "8"),
]
COMPARE = ["compare", "recipes/sanity_arithmetic/sanity_arithmetic.yaml"]


def test_script_makes_task_and_set_and_compares_and_takes_what_is_there(run_alone):
    script = partial(run_alone, SCRIPT, FAKE_PYTHON)
    compare = [*COMPARE, *"--precision bf16 --precision fp16 --pass-score 0.95 estimator=pg_seq_is data.seed=7".split()]
    assert [line.split() for line in script(MADE="journal.jsonl")[:2]] == [MAKE_TASK, SANITY_SET]
    assert script()[0].split() == SANITY_SET, "goes on with a filter that was stopped"
    assert [line.split() for line in script("data.seed=7")] == [compare]
    assert compose_recipe(RECIPE).data.train_files == "outputs/sanity_arithmetic/set/kept.parquet"
    compare = [*COMPARE, *"--precision fp32 --pass-score 0.95 estimator=grpo".split()]
    assert [line.split() for line in script(PRECISIONS="fp32", ESTIMATOR="grpo")] == [compare]


def test_first_steps_are_the_same_twice_and_a_prompt_is_the_sum_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(make_task, "KNOWN", 0.0)  # stop at the first look
    for name in "ab":
        torch.manual_seed(ord(name))  # the caller's random state has no say
        build_model(tmp_path / name)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[key], second[key]) for key in first)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    prompt = [{"role": "user", "content": "47+8="}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "47+8="
    assert len(tokenizer) == json.loads((tmp_path / "a" / "config.json").read_text())["vocab_size"]


def test_a_model_that_does_not_learn_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(make_task, "MAX_STEPS", 25)
    with pytest.raises(SystemExit, match="after 25 steps"):
        build_model(tmp_path / "model")
