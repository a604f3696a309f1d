"""Length alone: what its teacher teaches, its reward, attention in blocks, and the table that pages quote."""

import itertools

import pytest
import torch
from composer import ROOT, compose_recipe
from torch.nn.functional import scaled_dot_product_attention

from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.runs.read import read_runs

RECIPE = ROOT / "recipes/reasoning_length/reasoning_length.yaml"
SCRIPT = "recipes/reasoning_length/run_reasoning_qwen3_cpu.sh"
LENGTHS = (128, 512, 2048, 8192)


@pytest.fixture
def score(load_script):
    reward = load_script("recipes/reasoning_length/reward.py")
    return lambda text, truth, tokens: reward.compute_score(f"reasoning_{tokens}", " ".join(text), truth)


def test_every_lesson_is_right_reasoning_and_its_probabilities_are_the_teachers(make_task, score):
    (token_ids, probabilities), tokenizer = make_task.lessons(0)(), make_task.build_tokenizer()
    assert torch.allclose(probabilities.sum(-1), torch.ones(probabilities.shape[:2]))
    taught = probabilities.gather(2, token_ids[:, 1:, None]).squeeze(2)[:, make_task.PROMPT - 1 :]
    assert (taught > 0).all(), "the teacher says nothing that he does not teach"
    right, wrong, rate = make_task.teacher(torch.Generator().manual_seed(0))
    assert 0.3 <= rate.min() and rate.max() <= 0.7
    for row, teaches in zip(token_ids[::2], probabilities[::2, -2], strict=True):
        question, chapters, equals, *text, end = map(make_task.VOCABULARY.__getitem__, row)
        assert (chapters, equals, end) == (f"c{make_task.LESSON:03d}", "=", make_task.END)
        assert score(text, text[-1], make_task.LESSON * make_task.CHAPTER) == 1
        number = make_task.QUESTIONS.index(question)
        expected = {int(right[number]): float(rate[number]), int(wrong[number]): 1 - float(rate[number])}
        first = make_task.VOCABULARY.index("a00")
        assert {int(i) - first: pytest.approx(float(teaches[i])) for i in teaches.nonzero()} == expected
    assert tokenizer.decode(token_ids[0, :3]).split() == [make_task.VOCABULARY[i] for i in token_ids[0, :3]]
    assert not (token_ids[1::2, -1] == make_task.VOCABULARY.index(make_task.END)).all(), "others have more chapters"


def test_a_response_is_right_with_all_chapters_in_order_and_the_right_answer(score):
    steps = [f"s{step:02d}{'abcd'[step % 4]}" for step in range(62)]
    first, second = ["q03", "c001", *steps], ["q03", "c000", *steps]
    assert score([*first, *second, "a05"], "a05", 128) == score([*second, "a05"], "a05", 64) == 1
    other = ["q04", "c000", *steps]
    for wrong in ([*first, *second, "a06"], [*second, *first, "a05"], [*first, *other, "a05"], [*first, *second], []):
        assert score(wrong, "a05", 128) == 0
    mixed = ["q03", "c000", *steps[1:], steps[0], "a05"]
    assert score(mixed, "a05", 64) == score([*second, "a05"], "a05", 128) == 0


@pytest.mark.parametrize("tokens", [1, 95, 96, 97, 300])
def test_attention_in_blocks_is_attention_with_a_window(load_script, tokens):
    banded = load_script("recipes/reasoning_length/banded_attention.py")
    drawn = torch.Generator().manual_seed(tokens)
    states = [torch.randn(2, heads, tokens, 8, generator=drawn, requires_grad=True) for heads in (4, 2, 2)]
    found, _ = banded.banded_attention(None, *states, scaling=0.3, sliding_window=banded.WINDOW)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (distance >= 0) & (distance < banded.WINDOW)
    plain = scaled_dot_product_attention(*states, attn_mask=seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, plain)
    weight = torch.randn(found.shape, generator=drawn)
    for mine, theirs in zip(
        *(torch.autograd.grad((out * weight).sum(), states) for out in (found, plain)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match="window of 96"):
        banded.banded_attention(None, *states, sliding_window=32)


def test_the_control_gives_a_short_response_the_log_weight_of_a_long_one(load_script):
    """The weights of responses have the spread that is asked for, and a mean of 1."""
    sampled = [[-1.4 + 1e-4 * row, 0.0, -1e-7, *[-1.386] * 62] for row in range(500)]
    with_spread = load_script("recipes/reasoning_length/long_responses.py").with_spread
    noisy = [with_spread(row, 0.5) for row in sampled]
    assert with_spread(sampled[0], 0.5) == noisy[0] and all(row[1:3] == [0.0, -1e-7] for row in noisy)
    log_weights = torch.tensor(sampled).sum(-1) - torch.tensor(noisy).sum(-1)
    assert log_weights.std() == pytest.approx(0.5, rel=0.15) and log_weights.exp().mean() == pytest.approx(1, abs=0.1)
    assert with_spread([0.0], 0.5) == [0.0], "nothing in it is random"


def test_writes_one_model_for_all_lengths_and_keeps_what_is_there(make_task, monkeypatch, tmp_path):
    monkeypatch.setattr(make_task, "UPDATES", 2)
    monkeypatch.setattr("sys.argv", ["make_task.py", str(tmp_path / "task")])
    make_task.main()
    assert make_task.LENGTHS == LENGTHS
    for tokens in LENGTHS:
        config = compose_recipe(RECIPE, f"tokens={tokens}")
        assert config.data.train_files.endswith(f"/prompts_{tokens}.jsonl")
        problems = read_data_set(tmp_path / "task" / f"prompts_{tokens}.jsonl").problems
        assert len(problems) == config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert config.data.max_response_length == tokens + 2 == config.actor_rollout_ref.actor.loss_scale_factor
        assert config.actor_rollout_ref.rollout.max_model_len <= make_task.CONFIG["max_position_embeddings"]
        assert config.actor_rollout_ref.rollout.max_num_batched_tokens >= config.actor_rollout_ref.rollout.max_model_len
    before = (tmp_path / "task/model/model.safetensors").stat().st_mtime_ns
    make_task.main()
    assert (tmp_path / "task/model/model.safetensors").stat().st_mtime_ns == before


def test_an_arm_is_a_precision_an_estimator_and_a_length_and_the_script_names_them(run_alone):
    arms = compose_recipe(RECIPE).arms
    every = list(itertools.product(LENGTHS, ("pg_seq_is", "grpo_token_tis"), ("bf16", "fp16")))
    assert {name: list(words) for name, words in arms.items()} == {
        f"{precision}_{estimator}_{tokens}": [f"precision={precision}", f"estimator={estimator}", f"tokens={tokens}"]
        for tokens, estimator, precision in every
    }
    task, run = run_alone(SCRIPT, 'echo "$VERL_PLATFORM $@"', "actor_rollout_ref.actor.optim.lr=1e-3", SEEDS="1 2")
    assert task == "cpu recipes/reasoning_length/make_task.py outputs/reasoning_length/task"
    named = " ".join(f"--arm {precision}_{estimator}_{tokens}" for tokens, estimator, precision in every)
    recipe = "cpu compare recipes/reasoning_length/reasoning_length.yaml"
    assert run == f"{recipe} {named} --seed 1 --seed 2 --parallel 2 --once actor_rollout_ref.actor.optim.lr=1e-3"


def test_log_and_pages_have_what_the_recorded_runs_say(reader, root, tmp_path):
    runs = read_runs([ROOT / "tests/data/reasoning_length/sure"])
    outcomes = [reader.outcome_of(run) for run in runs]
    for name in ("sure", "again", "spread_1.6", "spread_3.4"):
        recorded = [reader.outcome_of(run) for run in read_runs([ROOT / "tests/data/reasoning_length" / name])]
        assert reader.table(recorded) in (root / "docs/log/length.md").read_text(), name
    for page in (RECIPE.parent / "README.md", root / "docs/metrics.md"):
        assert reader.by_length(outcomes) in page.read_text()
    reader.record(runs, tmp_path)
    assert [reader.outcome_of(run) for run in read_runs([tmp_path])] == outcomes, "what is recorded is all that is read"
