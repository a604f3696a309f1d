"""Sums, slips and rewards."""

import importlib.util

import make_task
import pytest
from make_task import PROMPT_LENGTH, RESPONSE_LENGTH, Sum, all_sums

from verl_precision.sampling.problems import read_data_set


def test_a_sum_with_and_one_without_a_carry_by_hand():
    """47 + 8: the digits reach 15, so it is taught as 45 in (15 - 8)/10 of the cases."""
    carried = Sum(47, 8)
    assert (carried.prompt, carried.answer, carried.slip, carried.slip_rate) == ("47+8=", "55", "45", 0.7)
    plain = Sum(41, 8)
    assert (plain.answer, plain.slip, plain.slip_rate) == ("49", None, 0.0)
    assert Sum(99, 9).slip_rate == 1.0
    assert Sum(91, 9).slip_rate == 0.2


def test_all_sums():
    sums = all_sums()
    assert len(set(sums)) == 810
    assert sum(s.slip is not None for s in sums) == 405  # 45 of the 90 pairs of digits carry
    assert {len(s.prompt) for s in sums} == {PROMPT_LENGTH}
    assert max(len(s.answer) + 1 for s in sums) == RESPONSE_LENGTH


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(make_task, "build_model", lambda folder, on_progress: folder.mkdir(parents=True))


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["make_task.py", *arguments])
    make_task.main()


def test_writes_rows_in_verls_format_with_right_answers_and_says_what_is_next(
    tmp_path, monkeypatch, capsys, no_training
):
    folder = tmp_path / "new" / "task"
    run(monkeypatch, str(folder))
    data = read_data_set(folder / "problems.jsonl")
    assert len(data.problems) == 810
    for problem in data.problems:
        first, second = problem.prompt[0]["content"].rstrip("=").split("+")
        assert int(problem.ground_truth) == int(first) + int(second)
    assert [path.name for path in folder.parent.iterdir()] == ["task"]
    assert f"verl-precision sanity-set {folder}/problems.jsonl --model {folder}/model" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="exists; nothing was written"):
        run(monkeypatch, str(folder))


def test_interrupted_it_leaves_nothing_that_looks_complete(tmp_path, monkeypatch, no_training):
    def interrupt(index, problem):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_task, "row", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, str(tmp_path / "new" / "task"))
    assert list((tmp_path / "new").iterdir()) == []


def test_reward_is_exact(root):
    specification = importlib.util.spec_from_file_location("reward", root / "recipes/sanity_arithmetic/reward.py")
    reward = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(reward)
    compute_score = reward.compute_score
    assert compute_score("arithmetic", "55", "55") == 1.0
    for wrong in ("45", "55 ", "055", "", "555"):
        assert compute_score("arithmetic", wrong, "55") == 0.0
