"""The recipe in which only the length is unusual: its sizes, the words of its script, its reward."""

import json
import runpy

import numpy as np
import pytest
from composer import ROOT, compose_recipe

FOLDER = ROOT / "recipes/long_text"
SCRIPT = "recipes/long_text/run_short_sentences_smollm2_135m_fsdp2.sh"


@pytest.mark.parametrize(("scale", "prompts", "tokens"), [("1x1_gpu", 16, 1024), ("cpu", 2, 64)])
def test_every_response_has_the_whole_length(scale, prompts, tokens):
    config = compose_recipe(FOLDER / "long_text.yaml", f"scale={scale}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert rollout.ignore_eos and config.data.max_response_length == tokens == actor.loss_scale_factor
    assert config.data.train_batch_size == prompts == actor.ppo_mini_batch_size, "one update a batch"
    assert config.actor_rollout_ref.model.path == "outputs/smollm2/model", "no scale puts a tiny model in its place"


def test_script_gets_the_model_once_and_compares_with_each_estimator(run_alone):
    fake = 'echo "${VERL_PLATFORM:--} $@"\nif [[ $3 == data ]]; then mkdir -p "$6"; fi'
    model, *runs = run_alone(SCRIPT, fake, "trainer.total_training_steps=2")
    assert model == "- data smollm2_135m_instruct --output outputs/smollm2/model"
    words = "- compare recipes/long_text/long_text.yaml scale=1x1_gpu --precision bf16 --precision fp16 --seed 0"
    assert runs == [f"{words} estimator={e} trainer.total_training_steps=2" for e in ("pg_seq_is", "grpo_token_tis")]
    (on_cpu,) = run_alone(SCRIPT, fake, SCALE="cpu", PRECISIONS="fp16", ESTIMATORS="grpo", SEEDS="0 1")
    assert on_cpu.startswith("cpu compare ") and on_cpu.endswith("--precision fp16 --seed 0 --seed 1 estimator=grpo")


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0), ("  \n", 0), ("It rains. We go home!  Why?", 1), ("one two three four five six seven eight nine", 0)]
    + [("It rains. One two three four five six seven eight nine.", 0.5), ("Version 1.5 is out.", 1)],
)
def test_reward_is_the_share_of_short_sentences(text, share):
    assert runpy.run_path(str(FOLDER / "short_sentences.py"))["compute_score"]("", text, "") == share


@pytest.mark.parametrize("kept", [0.0, 0.5], ids=["independent", "each half of the one before"])
def test_the_reader_of_gaps_tells_independent_gaps_from_others(tmp_path, kept):
    """Of gaps that follow each other the spread is above √(2 k3 T): here √3 times in the long run."""
    random, lines = np.random.default_rng(0), [{"settings": {}}]
    for response in range(200):
        gaps = random.normal(0, 0.01, 256)
        for token in range(1, 256):
            gaps[token] = kept * gaps[token - 1] + np.sqrt(1 - kept**2) * gaps[token]
        own = {"rollout": "bf16", "problem": 0, "response": response}
        lines += [{**own, "log_probs": [-1.0] * 256}, {**own, "train": "bf16", "log_probs": list(gaps - 1)}]
    (tmp_path / "journal.jsonl").write_text("\n".join(map(json.dumps, lines)))
    script = runpy.run_path(str(FOLDER / "read_gaps.py"))
    found = script["gaps_in"](tmp_path / "journal.jsonl")
    (correlations,) = map(script["correlations"], found.values())
    assert list(found) == ["bf16, bf16"] and len(correlations) == 8, "distances up to 128"
    for distance, (value, error) in zip(script["DISTANCES"], correlations, strict=False):
        assert value == pytest.approx(kept**distance if kept else 0, abs=4 * error)
    *_, last = script["growth"](found).splitlines()
    ratio = float(last.split("|")[6])
    assert last.startswith("| bf16, bf16 | 256 | 200 |") and ratio == pytest.approx(np.sqrt(3) if kept else 1, abs=0.2)
