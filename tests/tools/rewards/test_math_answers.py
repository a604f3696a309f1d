r"""Answers as mathematics judges them, and as the paper's authors do.

The verdicts in `verdicts.txt` are those of the authors' code (https://github.com/sail-sg/oat,
oat/utils/math_grader.py, `boxed_reward_fn`), which was run on every row with math-verify 0.9.0 and its limits of a
second. Those in `judged.txt` and `reported.txt` are by hand.
"""

import asyncio
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.jobs.problems import load_reward
from verl_precision.tools.rewards import answer_tag, boxed_answer, math_answers
from verl_precision.tools.rewards.math_answers import _Judge

pytest.importorskip("math_verify", reason="of the extra `dev`")


# Right or wrong, response, ground truth.
def recorded(name: str) -> list[tuple[str, ...]]:
    rows = (Path(__file__).parent / "recorded" / name).read_text().splitlines()
    return [tuple(cell.strip() for cell in row.split(" | ")) for row in rows if not row.startswith("#")]


PAIRS = recorded("verdicts.txt")
# Where the authors' rules are wrong: an inequality is the interval.
BY_MATHEMATICS = {("\\boxed{x \\le 2}", "(-\\infty,2]"): "1"}


@pytest.mark.parametrize(("name", "fewest"), [("judged.txt", 300), ("reported.txt", 40)])
def test_the_verdicts_of_mathematics(name, fewest):
    """As verl calls rewards: not in the main thread. Right and wrong answers of every kind, and near misses."""
    pairs = recorded(name)
    with ThreadPoolExecutor(1) as thread:
        found = list(thread.map(lambda row: math_answers.same_answer(*row[1:]), pairs))
    assert min(sum(row[0] == verdict for row in pairs) for verdict in "01") >= fewest // 2 - 20
    assert [row for row, right in zip(pairs, found, strict=True) if right != (row[0] == "1")] == []


def test_the_verdicts_of_the_authors():
    """With `as_published` in all rows, and by default where mathematics does not say otherwise."""
    assert len(PAIRS) >= 90
    for as_published in (True, False):
        with ThreadPoolExecutor(1) as thread:
            judged = partial(boxed_answer.compute_score, "math", as_published=as_published)
            found = list(thread.map(lambda row, judged=judged: judged(*row[1:]), PAIRS))
        rights = [right if as_published else BY_MATHEMATICS.get((said, true), right) for right, said, true in PAIRS]
        verdicts = [{"score": float(right), "acc": float(right)} for right in rights]
        assert [row for row, one, other in zip(PAIRS, found, verdicts, strict=True) if one != other] == []


@pytest.mark.parametrize(("answer", "truth", "published"), [
    ("-12", r"-12 \text{ or } -30", 1), ("3:8", "9:24", 1), (r"\{1,2\}", "(1,2)", 1), ("10^{-30}", "10^{-40}", 1),
    (r"5\text{ m}", r"5\text{ cm}", 1), (r"\boldsymbol{73}", "73", 0), ("0 < x < 12.5", "(0, 12.5)", 0),
])  # fmt: skip
def test_as_published_gives_the_authors_verdict_where_mathematics_gives_the_other(answer, truth, published):
    boxed, tagged = f"\\boxed{{{answer}}}", f"</think> <answer>{answer}</answer>"
    for response, score in ((boxed, boxed_answer), (tagged, answer_tag)):
        scores = [score.compute_score("math", response, truth, as_published=which) for which in (True, False)]
        found = [one if isinstance(one, float) else one["acc"] for one in scores]
        assert found == [published, 1 - published]


@pytest.mark.parametrize(("right", "response"), [
    (True, "1 + 1 </think> \\boxed{2}"), (False, "1 + 1 </think> so </think> \\boxed{2}"), (False, "\\boxed{2}"),
    (False, "\\boxed{2} </think> it is"),
])  # fmt: skip
def test_the_thought_is_closed_once_where_that_is_required(right, response):
    score = boxed_answer.compute_score("math", response, "2", wrong=-1.0, require_closed_thinking=True)
    assert score == {"score": 1.0 if right else -1.0, "acc": float(right)}
    assert boxed_answer.compute_score("math", response, "2")["acc"] == 1.0, "the default"


def test_a_response_that_was_cut_is_wrong_where_it_must_be_finished():
    for truncated in (True, False):
        found = boxed_answer.compute_score("math", "\\boxed{2}", "2", {"truncated": truncated}, require_finished=True)
        assert found["acc"] == float(not truncated)
    with pytest.raises(ConfigurationError, match="default_agent_loop=vp_single_turn") as error:
        boxed_answer.compute_score("math", "\\boxed{2}", "2", {"num_turns": 2}, require_finished=True)
    assert error.value.setting.endswith("reward_kwargs.require_finished") and error.value.allowed


def test_verls_reward_manager_hands_on_what_the_agent_loop_marked():
    """The columns are those of verl's `AgentLoopWorker._compute_score`."""
    score = partial(boxed_answer.compute_score, require_finished=True)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "\\boxed{2}")

    async def judged(truncated):
        columns = {"data_source": "math", "reward_model": {"ground_truth": "2"}}
        columns["tool_extra_fields"] = {"truncated": truncated}
        tensors = {"responses": torch.ones(1, 2), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
        non_tensors = {name: np.array([value], dtype=object) for name, value in columns.items()}
        data = DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)
        return (await NaiveRewardManager(OmegaConf.create(), tokenizer, score).run_single(data))["reward_score"]

    assert [asyncio.run(judged(truncated)) for truncated in (False, True)] == [1.0, 0.0]


def test_words_after_the_box_and_the_score_of_a_wrong_answer():
    """verl's rule for `math_dapo` reads the last 300 characters only, and gives -1."""
    long = "\\boxed{\\dfrac12}" + " and so on" * 40
    assert boxed_answer.compute_score("guru", long, "\\frac{1}{2}", wrong=-1.0) == {"score": 1.0, "acc": 1.0}
    assert boxed_answer.compute_score("guru", long, "\\frac{1}{3}", wrong=-1.0) == {"score": -1.0, "acc": 0.0}


@pytest.mark.parametrize(("right", "response"), [
    (1.0, "1 + 1 </think> <answer> 2 </answer>"), (1.0, "</think> <answer> so \\boxed{2.0} units </answer>"),
    (1.0, "</think> <answer> 2 </answer>\nUser: What is 2 + 2?\nAssistant: <think> </think> <answer> 4 </answer>"),
    (0.0, "</think> <answer> 4 </answer>\nUser: What is 1 + 1?\nAssistant: <think> </think> <answer> 2 </answer>"),
    (1.0, "<answer> 3 no </think> <answer> 2 </answer>"),  # the last that was opened before the stop
    (0.0, "<answer> 2 </answer>"),  # the thought is not closed
    (0.0, "</think> <answer> 2"), (0.0, "</think> <answer> \\boxed{2 </answer>"), (0.0, "</think> <answer>  </answer>"),
])  # fmt: skip
def test_answer_tags(right, response):
    assert answer_tag.compute_score("math", response, "2") == right


@pytest.fixture
def judge():
    judge = _Judge()
    yield judge
    judge.end()


def test_what_takes_too_long_counts_as_wrong_and_costs_the_process(judge):
    assert judge.says_equal("2/4", "1/2")
    first = judge._process
    if sys.platform == "linux":
        assert resource.prlimit(first.pid, resource.RLIMIT_AS)[0] <= math_answers.MEMORY
    os.kill(first.pid, signal.SIGSTOP)  # as deaf to signals of its own as a power in C
    judge.seconds = 0.1
    assert not judge.says_equal("2/4", "1/2")
    assert first.poll() is not None, "it has been ended"
    judge.seconds = math_answers.SECONDS
    assert judge.says_equal("2/4", "1/2"), "by a new one"
    judge._process.kill()
    judge._process.wait()
    assert not judge.says_equal("2/4", "1/2"), "it died"
    assert judge.says_equal("2/4", "1/2")


def test_a_forked_process_has_a_judge_of_its_own(judge):
    """A process that is asked by two would give one's reply to the other; and a lock may be held by a lost thread."""
    right, wrong = ("4/8", "1/2+0"), ("4/9", "1/2+0")
    assert judge.says_equal(*right)
    first = judge._process
    reading, writing = os.pipe()
    with judge._lock:
        child = os.fork()
        if child == 0:
            try:
                found = [judge.says_equal(*pair) for pair in [wrong, right] * 10]
                os.write(writing, b"1" if found == [False, True] * 10 and judge._process.pid != first.pid else b"0")
                judge.end()
            finally:
                os._exit(0)
    assert [judge.says_equal(*pair) for pair in [right, wrong] * 200] == [True, False] * 200
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"1"
    assert judge._process is first and judge.says_equal(*right), "the child's end does not end the parent's"


def test_a_reply_that_nobody_waited_for_is_not_the_next_ones(judge, monkeypatch):
    assert judge.says_equal("2/4", "1/2+0")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(math_answers, "_line", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        judge.says_equal("2/4", "1/2+0")
    assert not judge.says_equal("2/4", "1/3+0")


def test_hostile_answers_are_wrong_within_the_bound_and_the_next_one_is_judged(judge, tmp_path):
    assert 3 * math_answers.SECONDS_WITHIN < math_answers.SECONDS <= 10, "two answers are read, and compared"
    for hostile in (
        *("9^{9^{9^{9}}}", "7" * 200_000, f"__import__('os').mkdir('{tmp_path}/made')", "\\pm" * 50, "1," * 300),
        *("(" * 400 + "x" + ")" * 400, "{" * 400, "\\frac", "x^", "10^{10^{5}}", "100000000!", "1/0", "\x00"),
        "|" * 200,
    ):
        assert not judge.says_equal(hostile, "2")
        assert judge.says_equal("2/4", "1/2")
    judge.seconds = 1.0
    assert not judge.says_equal("9^{9^{9^{9}}}", "2", as_published=True)
    judge.seconds = math_answers.SECONDS
    assert judge.says_equal("2/4", "1/2")
    assert not (tmp_path / "made").exists()


def test_math_verify_must_be_there(monkeypatch):
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)
    for ask in (partial(load_reward, "math-verify"), partial(_Judge().says_equal, "2", "3")):
        with pytest.raises(math_answers.EnvironmentMismatchError, match="math-verify.*pip install"):
            ask()
