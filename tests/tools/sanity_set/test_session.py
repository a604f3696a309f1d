"""From verdicts to files: the kept set, what was saved, resuming, and what is refused before an engine starts."""

import json
import random
from contextlib import nullcontext

import pytest
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner

from verl_precision.base.errors import ConfigurationError
from verl_precision.cli import app
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.sanity_set import session
from verl_precision.tools.sanity_set.session import RecordedEngine, build_sanity_set
from verl_precision.tools.sanity_set.settings import SanitySet

EASY, HARD, FLIP = [True] * 40, [False] * 40, [index % 2 == 0 for index in range(40)]


def kept_rows(folder):
    return [row["extra_info"]["index"] for row in parquet.read_table(folder / "kept.parquet").to_pylist()]


def test_summary_by_hand_and_no_engine_for_a_finished_run(replay, monkeypatch):
    """In flight 1: 33 + 33 + 16 responses of 120; 10 tokens each."""
    summary, folder = replay([EASY, HARD, FLIP], in_flight=1)
    assert kept_rows(folder) == [2]
    assert (summary.kept, summary.too_easy, summary.too_hard) == (1, 1, 1)
    assert (summary.responses_drawn, summary.responses_saved) == (82, 38)
    assert (summary.tokens_drawn, summary.tokens_saved) == (820, 380)
    assert summary.histogram == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    content = json.loads((folder / "summary.json").read_text())
    assert content["summary"]["kept"] == 1
    assert [p["verdict"] for p in content["problems"].values()] == ["dropped", "dropped", "kept"]
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")

    before = (folder / "journal.jsonl").read_bytes()
    monkeypatch.setattr(session, "RecordedEngine", lambda path: pytest.fail("engine started"))
    again, _ = replay([EASY, HARD, FLIP], in_flight=64)  # how many are in flight is no part of the experiment
    assert again == summary
    assert (folder / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("torn", [False, True])
def test_interrupted_twice_and_resumed_nothing_is_lost_or_drawn_twice(replay, tmp_path, monkeypatch, torn):
    """Eight problems of all difficulties; tests/e2e/test_sanity_set.py does the same with vLLM and kill -9."""
    generator = random.Random(1)
    verdicts = [[generator.random() < number / 7 for _ in range(40)] for number in range(8)]
    journal, counted, submitted = tmp_path / "out" / "journal.jsonl", [], []

    class Mortal(RecordedEngine):
        def submit(self, requests):
            submitted.extend((request.problem, request.response) for request in requests)
            super().submit(requests)

        def poll(self):
            if not self.batches:
                raise KeyboardInterrupt
            self.batches -= 1
            return [self._waiting.popleft() for _ in range(min(5, len(self._waiting)))]

    monkeypatch.setattr(session, "RecordedEngine", Mortal)
    for batches in (9, 7, 1000):
        submitted.clear()
        Mortal.batches = batches
        with pytest.raises(KeyboardInterrupt) if batches < 1000 else nullcontext():
            _, folder = replay(verdicts, in_flight=12)
        assert not set(submitted) & set(counted), "drawn twice"
        if torn and batches < 1000:
            journal.write_bytes(journal.read_bytes()[:-9])
        lines = [json.loads(line) for line in journal.read_bytes().split(b"\n")[1:] if line.endswith(b"}")]
        on_disk = [(line["problem"], line["response"]) for line in lines]
        assert on_disk[: len(counted)] == counted, "lost"
        assert batches == 1000 or len(on_disk) == len(counted) + 5 * batches - torn
        counted = on_disk
    assert len(set(counted)) == len(counted)
    assert kept_rows(folder) == [index for index, row in enumerate(verdicts) if 8 <= sum(row) <= 32]


def test_a_window_that_keeps_everything_draws_nothing(replay):
    summary, folder = replay([EASY, HARD], low=0, high=1)
    assert (summary.kept, summary.responses_drawn, summary.responses_saved) == (2, 0, 80)
    assert kept_rows(folder) == [0, 1] and sum(summary.histogram) == 0


def test_a_result_that_somebody_else_made_is_left_alone(replay, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept.parquet").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"it has kept.parquet and no journal.jsonl"):
        replay([EASY, FLIP])
    assert (tmp_path / "out" / "kept.parquet").read_text() == "mine"


def test_a_window_that_keeps_nothing_shows_the_histogram(replay, tmp_path):
    with pytest.raises(ConfigurationError, match="keeps none of 3 problems") as caught:
        replay([EASY, EASY, HARD])
    assert "  0- 10%       1  ####################\n" in str(caught.value)
    assert f" 90-100%       2  {'#' * 40}\n" in str(caught.value)
    assert (tmp_path / "out" / "summary.json").is_file()
    assert not (tmp_path / "out" / "kept.parquet").exists()


def test_recorded_responses_that_run_out_are_named(replay):
    with pytest.raises(ConfigurationError, match="response 10 to problem .* is not in it"):
        replay([FLIP[:10]], responses_per_problem=40)


@pytest.mark.parametrize("line", [{"problem": "a"}, {"problem": "a", "response": 0, "tokens": 3, "correct": "yes"}])
def test_recorded_lines_that_are_not_responses_are_named(tmp_path, write_rows, line):
    with pytest.raises(ConfigurationError, match="line 1"):
        RecordedEngine(write_rows(tmp_path / "r.jsonl", [line]))


def test_recorded_text_is_judged_by_the_reward_and_kept_if_asked(tmp_path, row, write_rows):
    data = write_rows(tmp_path / "data.jsonl", [row(1, data_source="math_dapo")])
    name, texts = read_data_set(data).problems[0].identifier, [f"It is \\boxed{{{number}}}." for number in range(4)]
    lines = [{"problem": name, "response": index, "tokens": 3, "text": text} for index, text in enumerate(texts)]
    values = {"data": data, "model": "recorded", "replayed": write_rows(tmp_path / "r.jsonl", lines)}
    values |= {"output": tmp_path / "out", "responses_per_problem": 4, "keep_text": True, "all_responses": True}
    assert build_sanity_set(SanitySet(**values), Console(quiet=True)).kept == 1
    journal = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()[1:]]
    assert [(line["text"], line["correct"]) for line in journal] == [
        *zip(texts, [False, False, True, False], strict=True)
    ]


def test_replays_says_what_it_saved_and_resumes_with_shares_written_otherwise(tmp_path, row, write_rows, record):
    data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(3)])
    recorded = record(tmp_path / "recorded.jsonl", data, [FLIP] * 3)

    def invoke(*changes: str):
        arguments = [str(data), "--model", "m", "--output", str(tmp_path / "out"), "--responses", str(recorded)]
        result = CliRunner().invoke(app, ["sanity-set", *arguments, *changes])
        return result.exit_code, " ".join(result.output.split())

    code, text = invoke("--in-flight", "1", "--low", "20%", "--high", "4/5")
    assert code == 0, text
    assert "3/3 problems decided, 3 kept, 48 responses" in text
    assert "72 (60%)" in text  # 24 of 40 each
    code, text = invoke("--low", "0.2", "--high", "0.8")
    assert code == 0 and "resuming: 48 responses are in the journal" in text
