"""From verdicts to files: the kept set, what was saved, resuming, and what is refused before an engine starts."""

import json
import re

import pytest
from pyarrow import parquet
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.sanity_set import session
from verl_precision.tools.sanity_set.session import RecordedEngine, build_sanity_set
from verl_precision.tools.sanity_set.settings import SanitySet

EASY, HARD, FLIP = [True] * 40, [False] * 40, [index % 2 == 0 for index in range(40)]


@pytest.fixture
def recorded(tmp_path, row, write_rows):
    """Write a data set, and a response of ten tokens for each verdict: one row a problem, one column a response."""

    def write(verdicts):
        data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(len(verdicts))])
        lines = [
            {"problem": problem.identifier, "response": index, "correct": correct, "tokens": 10}
            for problem, each in zip(read_data_set(data).problems, verdicts, strict=True)
            for index, correct in enumerate(each)
        ]
        return data, write_rows(tmp_path / "recorded.jsonl", lines)

    return write


@pytest.fixture
def replay(tmp_path, recorded):
    """Build a sanity set from verdicts; returns the summary and the folder."""

    def run(verdicts, **options):
        data, replayed = recorded(verdicts)
        values = {"data": data, "model": "recorded", "output": tmp_path / "out", "replayed": replayed}
        job = SanitySet(**{**values, "responses_per_problem": len(verdicts[0]), **options})
        return build_sanity_set(job, Console(quiet=True)), tmp_path / "out"

    return run


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


def test_the_command_says_what_it_saved_and_resumes_with_shares_written_otherwise(recorded, tmp_path, typed):
    data, responses = recorded([FLIP] * 3)
    words = ["sanity-set", data, "--model", "m", "--output", tmp_path / "out", "--responses", responses]
    for shares, said in (
        # 24 of 40 are saved each.
        (("--in-flight", "1", "--low", "20%", "--high", "4/5"), "3/3 problems decided, 3 kept, 48 responses.*72 .60%"),
        (("--low", "0.2", "--high", "0.8"), "resuming: 48 responses are in the journal"),
    ):
        code, shown = typed(*words, *shares)
        assert code == 0 and re.search(said, shown), shown


def test_a_window_that_keeps_everything_draws_nothing(replay):
    summary, folder = replay([EASY, HARD], low=0, high=1)
    assert (summary.kept, summary.responses_drawn, summary.responses_saved) == (2, 0, 80)
    assert kept_rows(folder) == [0, 1] and sum(summary.histogram) == 0


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
    judged = [*zip(texts, [False, False, True, False], strict=True)]
    assert [(line["text"], line["correct"]) for line in journal] == judged
