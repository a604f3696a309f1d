r"""Answers as the paper's authors judge them.

The verdicts are those of their own code (https://github.com/sail-sg/oat, oat/utils/math_grader.py, `boxed_reward_fn`),
which was run on these rows with math-verify 0.9.0 and its limits of a second.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_precision.integration.rewards import answer_tag, boxed_answer, math_answers
from verl_precision.integration.rewards.math_answers import _Judge

pytest.importorskip("math_verify", reason="of the extra `dev`")

# Right or wrong, response, ground truth.
TABLE = r"""
1 | so \boxed{\dfrac{1}{2}}.                    | \frac{1}{2}
1 | \boxed{\tfrac12}                            | \frac{1}{2}
1 | \boxed{1/2}                                 | \frac{1}{2}
1 | \boxed{.5}                                  | \frac{1}{2}
1 | \boxed{\frac{2}{4}}                         | \frac{1}{2}
1 | \boxed{\frac{1}{-2}}                        | -\frac{1}{2}
0 | \boxed{1}                                   | \frac{1}{2}
1 | \boxed{(1, 2)}                              | (1,2)
1 | \boxed{\left(1,2\right)}                    | (1, 2)
1 | \boxed{\left(\frac{1}{2}, 3\right)}         | (0.5,3)
0 | \boxed{[1,2]}                               | (1,2)
0 | \boxed{(2,1)}                               | (1,2)
1 | \boxed{\{1,2\}}                             | \{2,1\}
1 | \boxed{2,1}                                 | 1,2
0 | \boxed{1, 2, 3}                             | 1,2
1 | \boxed{x^2+2x+1}                            | (x+1)^2
0 | \boxed{x^2+1}                               | x^2+2
1 | \boxed{\sqrt{8}}                            | 2\sqrt{2}
0 | \boxed{2.828}                               | 2\sqrt{2}
1 | \boxed{10,000}                              | 10000
1 | \boxed{10000}                               | 10,\!000
1 | \boxed{5\%}                                 | 5
0 | \boxed{5\%}                                 | 0.05
1 | \boxed{\$5}                                 | 5
1 | \boxed{5 \text{ cm}}                        | 5
1 | \boxed{5\,\text{cm}}                        | 5\text{ cm}
1 | \boxed{90^\circ}                            | 90
1 | \boxed{\text{East}}                         | \text{east}
1 | \boxed{Evelyn}                              | \text{Evelyn}
1 | \boxed{C}                                   | \text{(C)}
0 | \boxed{\text{No}}                           | \text{Yes}
1 | \boxed{x = 5}                               | 5
1 | \boxed{5}                                   | x=5
1 | \boxed{3+2x = y}                            | y=2x+3
1 | \boxed{(-\infty, 2]}                        | (-\infty,2]
0 | \boxed{x \le 2}                             | (-\infty,2]
1 | \boxed{2^{10}}                              | 1024
1 | \boxed{\binom{5}{2}}                        | 10
1 | \boxed{\pi/4}                               | \frac{\pi}{4}
0 | \boxed{\frac{\pi}{4}}                       | 0.785
1 | \boxed{3 \frac12}                           | \frac{7}{2}
1 | \boxed{11}                                  | 11_2
1 | \boxed{\begin{pmatrix}1 & 2\end{pmatrix}}   | \begin{pmatrix} 1&2 \end{pmatrix}
0 | \boxed{\begin{pmatrix}1\\2\end{pmatrix}}    | \begin{pmatrix}2\\1\end{pmatrix}
1 | \boxed{1+i}                                 | i+1
1 | \boxed{3+\sqrt{2}, 3-\sqrt{2}}              | 3 \pm \sqrt{2}
1 | \boxed{204.0}                               | 204
1 | \boxed{33}                                  | 033
0 | \boxed{-7}                                  | 7
1 | \boxed{6 \times 10^3}                       | 6000
1 | \boxed{4\text{ or }5}                       | 4,5
0 | \boxed{1.33333}                             | \frac{4}{3}
1 | \boxed{3}, no: \boxed{4}                    | 4
0 | \boxed{4}, no: \boxed{3}                    | 4
1 | \boxed{\boxed{4}}                           | 4
0 | \boxed{4}, so \boxed{4                      | 4
0 | \boxed{4                                    | 4
0 | \boxed{}                                    | 4
0 | \boxed 4                                    | 4
0 | \fbox{4}                                    | 4
0 | no box, but 4                               | 4
"""
PAIRS = [tuple(cell.strip() for cell in line.split(" | ")) for line in TABLE.strip().splitlines()]


def test_the_verdicts_of_the_authors():
    """As verl calls rewards: not in the main thread, where math-verify's signals would work."""
    with ThreadPoolExecutor(1) as thread:
        found = list(thread.map(lambda row: boxed_answer.compute_score("math", *row[1:]), PAIRS))
    verdicts = [{"score": float(right), "acc": float(right)} for right, _, _ in PAIRS]
    assert len(PAIRS) >= 50
    assert [row for row, one, other in zip(PAIRS, found, verdicts, strict=True) if one != other] == []


def test_words_after_the_box_and_the_score_of_a_wrong_answer():
    """verl's rule for `math_dapo` reads the last 300 characters only, and gives -1."""
    long = "\\boxed{\\dfrac12}" + " and so on" * 40
    assert boxed_answer.compute_score("guru", long, "\\frac{1}{2}", wrong=-1.0) == {"score": 1.0, "acc": 1.0}
    assert boxed_answer.compute_score("guru", long, "\\frac{1}{3}", wrong=-1.0) == {"score": -1.0, "acc": 0.0}


@pytest.mark.parametrize(
    ("right", "response"),
    [
        (1.0, "1 + 1 </think> <answer> 2 </answer>"),
        (1.0, "1 + 1 </think> <answer> $2$ </answer>"),
        (1.0, "</think> <answer> so \\boxed{2.0} units </answer>"),
        (1.0, "</think> <answer> 2 </answer>\nUser: What is 2 + 2?\nAssistant: <think> </think> <answer> 4 </answer>"),
        (0.0, "</think> <answer> 4 </answer>\nUser: What is 1 + 1?\nAssistant: <think> </think> <answer> 2 </answer>"),
        (1.0, "<answer> 3 no </think> <answer> 2 </answer>"),  # the last that was opened before the stop
        (0.0, "<answer> 2 </answer>"),  # the thought is not closed
        (0.0, "</think> <answer> 2"),
        (0.0, "</think> <answer> \\boxed{2 </answer>"),
        (0.0, "</think> <answer>  </answer>"),
        (0.0, "2"),
    ],
)
def test_answer_tags(right, response):
    assert answer_tag.compute_score("math", response, "2") == right


def test_what_takes_too_long_counts_as_wrong_and_costs_the_process():
    judge = _Judge()
    try:
        assert judge.says_equal("2/4", "1/2")
        first = judge._process
        os.kill(first.pid, signal.SIGSTOP)  # as deaf to signals of its own as a power in C
        judge._seconds = 0.1
        assert not judge.says_equal("2/4", "1/2")
        assert first.poll() is not None, "it has been ended"
        judge._seconds = math_answers.SECONDS
        assert judge.says_equal("2/4", "1/2"), "by a new one"
        judge._process.kill()
        judge._process.wait()
        assert not judge.says_equal("2/4", "1/2"), "it died"
        assert judge.says_equal("2/4", "1/2")
    finally:
        judge._end()


def test_math_verify_must_be_there(monkeypatch):
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)
    with pytest.raises(math_answers.EnvironmentMismatchError, match="math-verify.*pip install"):
        _Judge().says_equal("2", "3")
