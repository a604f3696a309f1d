"""Sums, slips and rewards."""

import json

from verl_precision.arithmetic.reward import compute_score
from verl_precision.arithmetic.task import PROMPT_LENGTH, RESPONSE_LENGTH, Sum, all_sums, write_rows
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


def test_rows_are_in_verls_format_and_their_answers_right(tmp_path):
    write_rows(tmp_path / "problems.jsonl")
    data = read_data_set(tmp_path / "problems.jsonl")
    assert len(data.problems) == 810
    for problem in data.problems:
        first, second = problem.prompt[0]["content"].rstrip("=").split("+")
        assert int(problem.ground_truth) == int(first) + int(second)
    assert json.loads((tmp_path / "problems.jsonl").read_text().splitlines()[0])["extra_info"]["index"] == 0


def test_reward_is_exact():
    assert compute_score("arithmetic", "55", "55") == 1.0
    for wrong in ("45", "55 ", "055", "", "555"):
        assert compute_score("arithmetic", wrong, "55") == 0.0
