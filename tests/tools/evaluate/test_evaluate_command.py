"""`verl-precision evaluate`: refuses before anything is written, continues a cut journal, judges each context."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.seeds import response_seed
from verl_precision.cli import app
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.engines.model import load_tokenizer
from verl_precision.tools.evaluate import session
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.problems import read_data_set

LAST_WORD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split("=")[-1] == ground_truth)
"""
TRUTHS = "012"


class MadeUp:
    """vLLM's engine: the seed chooses the answer, each character is a token. It dies after some responses."""

    engines = 1

    def __init__(self, build, seen, lives):
        self.build, self.seen, self.lives, self.asked = build, seen, lives, []
        self.tokenizer = load_tokenizer("tiny:qwen3")

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        if self.lives and len(self.seen) >= self.lives:
            raise KeyboardInterrupt
        request = self.asked.pop(0)
        self.seen.append((self.build.keywords["dtype"], request))
        ids = self.tokenizer(f"={request.seed % 3}==={request.seed % 2}")["input_ids"][: request.max_tokens]
        text = self.tokenizer.decode(ids)
        return [Response(request.problem, request.response, len(ids), text, token_ids=tuple(ids), finish_reason="stop")]

    def close(self):
        """Nothing is held."""


@pytest.fixture
def run(tmp_path, monkeypatch, row, write_rows):
    """Evaluate three problems with an engine that is made up; return what came of it, and the requests."""
    (tmp_path / "reward.py").write_text(LAST_WORD)
    for name, numbers in (("sums", (0, 1, 2)), ("two", (1, 2))):
        rows = [row(number, reward_model={"style": "rule", "ground_truth": TRUTHS[number]}) for number in numbers]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    seen = []

    def evaluate(folder="job", lives=0, keep_text=False, **changes):
        values = {"model": "tiny:qwen3", "data": (tmp_path / "sums.jsonl", tmp_path / "two.jsonl"), "responses": 5}
        values |= {"dtypes": ("bf16", "fp16"), "contexts": (100, 200), "reward": str(tmp_path / "reward.py")}
        monkeypatch.setattr(session, "start_engine", lambda build, *arguments: MadeUp(build, seen, lives))
        shown = io.StringIO()
        console = Console(file=shown, width=120)
        evaluation = Evaluation(**{**values, **changes})
        found = session.evaluate(evaluation, tmp_path / folder, console, keep_text=keep_text)
        return found, shown.getvalue()

    return evaluate, seen


def test_a_job_interrupted_twice_and_cut_ends_as_if_it_were_not(run, tmp_path):
    evaluate, requests = run
    whole, _ = evaluate("whole")
    drawn = list(requests)
    assert len(drawn) == 2 * 3 * 5, "what is in both data sets is drawn once"
    requests.clear()
    journal = tmp_path / "job" / "journal.jsonl"
    for lives in (4, 21):  # in the first dtype; in the second
        with pytest.raises(KeyboardInterrupt):
            evaluate(lives=lives)
        assert not (tmp_path / "job" / "table.md").exists()
    journal.write_bytes(journal.read_bytes()[:-5])
    found, shown = evaluate()
    assert "resuming: 20 responses are in the journal; a torn last line was cut off" in shown
    assert requests[:21] + requests[22:] == drawn and requests[21] == requests[20], "only the torn one twice"
    assert journal.read_text() == (tmp_path / "whole" / "journal.jsonl").read_text()
    assert [(each.average, each.error) for each in found] == [(each.average, each.error) for each in whole]
    assert "15/15 responses drawn in fp16" in shown and "wrote table.md and summary.json" in shown

    written = (tmp_path / "job" / "summary.json").read_text()
    _, shown = evaluate()
    assert len(requests) == 31 and "resuming: 30 responses" in shown, "a finished job starts no engine"
    assert (tmp_path / "job" / "summary.json").read_text() == written


def test_accuracies_are_those_of_the_texts(run, tmp_path):
    """The seed decides: in the long context the last character is seed % 2, in the short one, which cuts, seed % 3."""
    evaluate, requests = run
    tokenizer = load_tokenizer("tiny:qwen3")
    data = read_data_set(tmp_path / "sums.jsonl").problems
    chats = [tokenizer.apply_chat_template(each.prompt, add_generation_prompt=True, return_dict=False) for each in data]
    assert len({len(chat) for chat in chats}) == 1
    short, long = len(chats[0]) + 2, len(chats[0]) + 6
    found, shown = evaluate(contexts=(short, long), keep_text=True)
    assert {request.max_tokens for _, request in requests} == {6}
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


def test_other_settings_and_damaged_journals_are_refused(run, tmp_path):
    evaluate, _ = run
    evaluate()
    journal = tmp_path / "job" / "journal.jsonl"
    before = journal.read_bytes()
    for changes, words in (
        ({"seed": 1}, "seed: 0 there, 1 now"),
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
    journal.unlink()
    with pytest.raises(ConfigurationError, match=r"it has (summary.json|table.md) and no journal.jsonl"):
        evaluate()


def test_unreadable_answers_are_left_out_and_counted(run, tmp_path, row, write_rows):
    evaluate, requests = run
    empty = {"reward_model": {"style": "rule", "ground_truth": " "}}
    data = write_rows(tmp_path / "some.jsonl", [row(1), row(2, **empty), row(3)])
    found, _ = evaluate(data=(data,), reward="verl")
    assert len(found[0].shares_P) == 2 and len(requests) == 2 * 2 * 5
    assert "cannot read the answer: 1 problems" in (tmp_path / "job" / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "half"], "--dtype half: this cannot work. Allowed: 'fp16', 'bf16' or 'fp32'"),
        (["--dtype", "fp16", "--dtype", "fp16"], "--dtype: fp16 is given twice"),
        (["--context", "64"], "--context: 64 is given twice"),
        (["--context", "0"], "--context 0: this cannot work"),
        (["--context", "9"], "--context 9: the longest prompt has"),
        (["--context", "4096"], "and the model's context 2048. Allowed: "),
        (["--data", "DATA"], "--data: data is given twice. Allowed: at least one, each once"),
        (["--responses", "0"], "--responses 0: this cannot work"),
        (["--temperature", "-1"], "--temperature -1.0: this cannot work"),
        (["--temperature", "0"], "--responses 32: at temperature 0 all responses to a problem are the same"),
        (["--top-p", "0"], "--top-p 0.0: this cannot work"),
        (["--reward", "nowhere.py"], "--reward nowhere.py: it cannot be loaded"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(arguments, words, tmp_path, row, write_rows):
    data = str(write_rows(tmp_path / "data.jsonl", [row(1)]))
    given = [data if word == "DATA" else word for word in arguments]
    command = ["evaluate", "tiny:qwen3", "--data", data, "--context", "64", "--output", str(tmp_path / "out"), *given]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and words in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out").exists()


def test_another_model_that_is_not_there(tmp_path, row, write_rows):
    data = str(write_rows(tmp_path / "data.jsonl", [row(1)]))
    result = CliRunner().invoke(app, ["evaluate", "nowhere", "--data", data, "--context", "64"])
    assert result.exit_code == 1 and "model='nowhere': no such folder" in " ".join(result.output.split())
