"""The model that forgets the carry: trained once for this module."""

import json

import make_task
import pytest
import torch
from make_task import KNOWN, all_sums, build_model, encode, response_log_probs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return folder, progress reports and the loaded model."""
    from transformers import AutoModelForCausalLM

    seen: list[tuple[int, float]] = []
    folder = tmp_path_factory.mktemp("arithmetic") / "model"
    build_model(folder, lambda step, known: seen.append((step, known)))
    return folder, seen, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def accuracy(trained):
    """Probability of a right response, exactly: no sampling."""
    with torch.no_grad():
        return response_log_probs(trained[2], encode([s.answer for s in all_sums()])).exp()


def test_accuracies_spread_over_the_whole_range(accuracy):
    """Each fifth of [0, 1] has its problems, and the window of the sanity test hundreds."""
    counts = torch.histc(accuracy, 5, 0, 1)
    assert counts.min() >= 20
    assert ((accuracy >= 0.2) & (accuracy <= 0.8)).sum() >= 150


def test_it_has_the_habit_it_was_taught(trained, accuracy):
    sums = all_sums()
    rates = torch.tensor([s.slip_rate for s in sums])
    with torch.no_grad():
        slips = response_log_probs(trained[2], encode([s.slip or s.answer for s in sums])).exp()
    carried = rates > 0
    assert accuracy[~carried].mean() > 0.93
    assert (accuracy + slips)[carried].mean() > 0.9
    correlation = torch.corrcoef(torch.stack([slips[carried], rates[carried]]))[0, 1]
    assert correlation > 0.5


def test_training_stops_when_it_knows_enough(trained):
    steps, known = zip(*trained[1], strict=True)
    assert known[-1] >= KNOWN > max(known[:-1])
    assert steps[-1] < 1000


def test_prompt_is_the_sum_itself(trained):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47+8="}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == "47+8="
    assert len(tokenizer) == json.loads((trained[0] / "config.json").read_text())["vocab_size"]


def test_first_steps_are_the_same_twice(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(make_task, "KNOWN", 0.0)  # stop at the first look
    for name in "ab":
        torch.manual_seed(ord(name))  # the caller's random state has no say
        build_model(tmp_path / name)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_model_that_does_not_learn_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(make_task, "MAX_STEPS", 25)
    with pytest.raises(SystemExit, match="after 25 steps"):
        build_model(tmp_path / "model")
