"""The recipe of the pre-trained model: its sizes on a CPU and on a GPU, and the steps of its script."""

from functools import partial

import pytest
from composer import ROOT, compose_recipe

RECIPE = ROOT / "recipes/smollm2/smollm2.yaml"
SCRIPT = "recipes/smollm2/run_reasoning_gym_smollm2_135m_fsdp2.sh"
ON_GPU = ("scale=1x1_gpu", "arithmetic=native")
REWARD = "pkg://verl_precision.tools.rewards.reasoning_gym_answer"


@pytest.mark.parametrize(("overrides", "prompts", "tokens"), [((), 4, 32), (ON_GPU, 64, 1024)])
def test_sizes_by_device(overrides, prompts, tokens):
    config = compose_recipe(RECIPE, *overrides)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n, config.data.max_response_length) == (prompts, 8, tokens)
    assert actor.ppo_mini_batch_size == prompts, "one update a batch"
    longest = config.data.max_prompt_length + tokens
    assert rollout.max_model_len >= longest and actor.ppo_max_token_len_per_gpu >= longest
    assert config.actor_rollout_ref.model.path == "outputs/smollm2/model", "no scale puts a tiny model in its place"
    assert config.reward.custom_reward_function.path == REWARD


FAKE_PYTHON = """
echo "${VERL_PLATFORM:--} $@"
while [[ $1 != --output && $1 != compare ]]; do shift; done
[[ $1 == compare ]] || mkdir -p "$2"
"""


def test_script_gets_model_problems_and_set_and_compares_and_never_ignores_a_choice(run_alone):
    script = partial(run_alone, SCRIPT, FAKE_PYTHON)
    fewer = {"TASKS": "products chain_sum", "LEVELS": "2", "PROBLEMS": "9"}
    model, problems, kept, compare = script("trainer.total_training_steps=2", **fewer)
    assert model == "cpu data smollm2_135m_instruct --output outputs/smollm2/model"
    assert problems.startswith("cpu data reasoning_gym --task products --task chain_sum --level 2 --size 9 ")
    assert kept.startswith("cpu sanity-set outputs/smollm2/reasoning_gym.parquet --model outputs/smollm2/model ")
    assert f"--reward {REWARD} " in kept
    assert compare.startswith("cpu compare recipes/smollm2/smollm2.yaml scale=cpu --parallel 2 --precision bf16 ")
    assert compare.endswith("--precision fp16 --seed 0 estimator=pg_seq_is trainer.total_training_steps=2")
    assert compose_recipe(RECIPE).data.train_files == "outputs/smollm2/set/kept.parquet"
    again = script(SCALE="1x1_gpu", ESTIMATORS="grpo pg_seq_is", SEEDS="0 1", PRECISIONS="fp16")
    assert "--dtype fp32 " in kept and "--dtype bf16 " in again[1], "the filter's, on a CPU and on a GPU"
    # The model is there. The verbs themselves take problems and a set of the same choices, and refuse others.
    assert [line.split()[1] for line in again] == ["data", "sanity-set", "compare", "compare"]
    options = (
        "- compare recipes/smollm2/smollm2.yaml scale=1x1_gpu arithmetic=native --precision fp16 --seed 0 --seed 1"
    )
    assert again[2:] == [f"{options} estimator={name}" for name in ("grpo", "pg_seq_is")]
