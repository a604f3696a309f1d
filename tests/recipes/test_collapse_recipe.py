"""The collapse's task: what its teacher teaches, its dose, its reward, and the reader of known runs."""

import pytest
import torch
from composer import ROOT, compose_recipe

from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.runs.read import read_runs

RECIPE = ROOT / "recipes/collapse/collapse.yaml"


@pytest.fixture
def compute_score(load_script):
    reward = load_script("recipes/collapse/reward.py")
    return lambda text, truth: reward.compute_score("collapse", text, truth)


@pytest.fixture
def barely_trained(make_task, monkeypatch):
    monkeypatch.setattr(make_task, "UPDATES", 2)
    return make_task


def test_the_teacher_is_right_as_often_as_he_says_and_every_lesson_is_in_order(make_task, compute_score):
    batch, tokenizer = make_task.lessons(0), make_task.build_tokenizer()
    answers = dict(zip(make_task.QUESTIONS, make_task.right_answers(0), strict=True))
    texts = [tokenizer.decode(row, skip_special_tokens=True) for _ in range(8) for row in batch()]
    scores = []
    for question, equals, *response in map(str.split, texts):
        assert equals == "=" and compute_score(" ".join(response), response[-1]) == 1, "the reasoning is always right"
        scores.append(compute_score(" ".join(response), answers[question]))
    *_, rates = make_task.teacher(torch.Generator().manual_seed(0))
    assert torch.tensor(scores).mean() == pytest.approx(float(rates.mean()), abs=0.08)
    assert 0.3 <= rates.min() and rates.max() <= 0.7


def test_a_response_is_right_with_all_steps_in_order_and_the_right_answer(compute_score):
    steps = [f"s{number:03d}{'abcd'[number % 4]}" for number in range(128)]
    assert compute_score(" ".join([*steps, "a03"]), "a03") == 1
    swapped = [*steps[1:], steps[0], "a03"]
    for wrong in ([*steps, "a04"], [*steps[:-1], "a03"], swapped, [*steps, "a03", "a03"], steps, []):
        assert compute_score(" ".join(wrong), "a03") == 0


def test_the_dose_changes_logits_and_no_probability(barely_trained):
    model = barely_trained.build_model(0).double()
    token_ids = barely_trained.lessons(1)()[:4]
    plain, again = model(input_ids=token_ids).logits, barely_trained.build_model(0).double()
    assert torch.equal(again(input_ids=token_ids).logits, plain), "the same seed writes the same model"
    barely_trained.raise_logits(model, 100)
    raised = model(input_ids=token_ids).logits
    torch.testing.assert_close(raised.log_softmax(-1), plain.log_softmax(-1), rtol=0, atol=1e-9)
    assert 50 < float((raised - plain).square().mean().sqrt()) < 200


def test_writes_a_model_for_each_dose_and_keeps_what_is_there(barely_trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_task.py", str(tmp_path / "task")])
    barely_trained.main()
    names = {f"logits_{size}" for size in barely_trained.LOGIT_SIZES}
    assert {path.name for path in (tmp_path / "task").iterdir()} == {*names, "prompts.jsonl"}
    data = read_data_set(tmp_path / "task/prompts.jsonl")
    assert len(data.problems) == len(barely_trained.QUESTIONS) == compose_recipe(RECIPE).data.train_batch_size
    written = tmp_path / "task/logits_0/model.safetensors"
    before = written.stat().st_mtime_ns
    barely_trained.main()
    assert written.stat().st_mtime_ns == before
    config = compose_recipe(RECIPE, "logit_size=200")
    assert config.data.max_response_length == 128 + 2
    assert config.actor_rollout_ref.model.path.endswith("/logits_200")


def test_mismatch_of_the_first_steps_and_reward_of_the_last(reader, write_run, tmp_path):
    """A run that rises and falls in BF16 while its mismatch grows, one in FP16 that rises, and one without a gap."""
    same = {"mismatch/probs_pearson": 0.99, "mismatch/sequence_log_ratio_std": 1.1, "mismatch/sequence_ess": 40.0}
    for arm, k3, last in (("bf16_100", 1e-2, 0.1), ("bf16_exact_100", 0, 0.8), ("fp16_100", 1e-4, 0.9)):
        steps = [(0.3, k3)] * 10 + [(0.6, 100 * k3)] * 10 + [(last, 100 * k3)] * 10
        write_run(arm, 3, [{"critic/score/mean": reward, "mismatch/k3_kl": each, **same} for reward, each in steps])
    outcomes = [reader.outcome_of(run) for run in read_runs([tmp_path])]
    header, _, *rows = reader.table(outcomes).splitlines()
    assert header.split(" | ")[0] == "| logits"
    assert rows == [
        "| 100 | bf16 | 3 | 30 | 1.0e-02 | 0.9900 | 1.10 | 40 | 0.30 | 0.60 | 0.10 | none |",
        "| 100 | bf16_exact | 3 | 30 | 0.0e+00 | 0.9900 | 1.10 | 40 | 0.30 | 0.80 | 0.80 | none |",
        "| 100 | fp16 | 3 | 30 | 1.0e-04 | 0.9900 | 1.10 | 40 | 0.30 | 0.90 | 0.90 | none |",
    ]
