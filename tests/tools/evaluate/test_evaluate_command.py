"""What `verl-precision evaluate` judges and refuses beside what every job does (tests/tools/jobs/test_contract.py)."""

import json

import pytest
from made_up import six_characters
from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.tools.engines.model import load_tokenizer
from verl_precision.tools.evaluate import session
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.problems import read_data_set

LAST_WORD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split("=")[-1] == ground_truth)
"""
TRUTHS = "012"


@pytest.fixture
def evaluate(tmp_path, made_up, row, write_rows):
    """Evaluate three problems with an engine that is made up: the seed chooses the answer."""
    made_up.answer = six_characters
    (tmp_path / "reward.py").write_text(LAST_WORD)
    for name, numbers in (("sums", (0, 1, 2)), ("two", (1, 2))):
        rows = [row(number, reward_model={"style": "rule", "ground_truth": TRUTHS[number]}) for number in numbers]
        write_rows(tmp_path / f"{name}.jsonl", rows)

    def run(**changes):
        values = {"model": "tiny:qwen3", "data": (tmp_path / "sums.jsonl", tmp_path / "two.jsonl"), "responses": 5}
        values |= {"dtypes": ("bf16", "fp16"), "contexts": (100, 200), "reward": str(tmp_path / "reward.py")}
        return session.evaluate(Evaluation(output=tmp_path / "job", **{**values, **changes}), Console(quiet=True))

    return run


def test_what_is_in_both_data_sets_is_drawn_once(evaluate, made_up):
    evaluate()
    assert len(made_up.seen) == 2 * 3 * 5


def test_accuracies_are_those_of_the_texts(evaluate, made_up, tmp_path):
    """The seed decides: in the long context the last character is seed % 2, in the short one, which cuts, seed % 3."""
    tokenizer = load_tokenizer("tiny:qwen3")
    data = read_data_set(tmp_path / "sums.jsonl").problems
    chats = [tokenizer.apply_chat_template(each.prompt, add_generation_prompt=True, return_dict=False) for each in data]
    assert len({len(chat) for chat in chats}) == 1
    short, long = len(chats[0]) + 2, len(chats[0]) + 6
    found = evaluate(contexts=(short, long), keep_text=True)
    assert {request.max_tokens for _, request in made_up.requests} == {6}
    for each in found:
        names = [problem.identifier for problem in data if each.data == "sums" or problem.ground_truth != "0"]
        truths = [problem.ground_truth for problem in data if problem.identifier in names]
        modulus = 3 if each.context == short else 2
        shares = [
            sum(str(response_seed(0, name, index) % modulus) == truth for index in range(5)) / 5
            for name, truth in zip(names, truths, strict=True)
        ]
        assert each.shares_P.tolist() == shares
        assert each.truncated == (1.0 if each.context == short else 0.0)
        assert each.mean_tokens == (2 if each.context == short else 6)
    lines = [json.loads(line) for line in (tmp_path / "job" / "journal.jsonl").read_text().splitlines()[1:]]
    assert all(line["text"].count("=") == 4 for line in lines)
    assert "| sums | " in (tmp_path / "job" / "table.md").read_text()
    assert len(json.loads((tmp_path / "job" / "summary.json").read_text())["differences"]) == 4


def test_other_settings_and_damaged_journals_are_refused(evaluate, tmp_path):
    evaluate()
    journal = tmp_path / "job" / "journal.jsonl"
    before = journal.read_bytes()
    for changes, words in (
        ({"temperature": 1.0}, "temperature: 0.6 there, 1.0 now"),
        ({"contexts": (200,)}, r"contexts: \[100, 200\] there, \[200\] now"),
        ({"data": (tmp_path / "sums.jsonl",)}, "data: "),
        ({"reward": "verl"}, "reward: 'reward.py:compute_score@.*' there, 'verl' now"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            evaluate(**changes)
    assert journal.read_bytes() == before
    for damage in ({"dtype": "fp32"}, {"problem": "x"}, {"response": 5}, {"correct": [True]}, {"correct": [1, 0]}):
        record = {**json.loads(before.splitlines()[1]), **damage}
        journal.write_bytes(before + json.dumps(record).encode() + b"\n")
        with pytest.raises(CheckpointStateError, match="is none of this job's"):
            evaluate()


def test_unreadable_answers_are_left_out_and_counted(evaluate, made_up, tmp_path, row, write_rows):
    empty = {"reward_model": {"style": "rule", "ground_truth": " "}}
    data = write_rows(tmp_path / "some.jsonl", [row(1), row(2, **empty), row(3)])
    found = evaluate(data=(data,), reward="verl")
    assert len(found[0].shares_P) == 2 and len(made_up.seen) == 2 * 2 * 5
    assert "cannot read the answer: 1 problems" in (tmp_path / "job" / "table.md").read_text()
