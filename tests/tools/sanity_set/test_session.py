"""From verdicts to files: the kept set, what was saved, resuming, and what is refused before an engine starts."""

import json
import random
from contextlib import nullcontext
from fractions import Fraction

import pytest
from pyarrow import parquet
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.sanity_set import session
from verl_precision.tools.sanity_set.replayed import RecordedEngine
from verl_precision.tools.sanity_set.session import Options, build_sanity_set
from verl_precision.tools.sanity_set.window import Window

EASY, HARD, FLIP = [True] * 40, [False] * 40, [index % 2 == 0 for index in range(40)]


@pytest.fixture
def no_engine(monkeypatch):
    """Return a function after whose call a test fails when an engine starts."""
    return lambda: monkeypatch.setattr(session, "_engine", lambda options: pytest.fail("engine started"))


def kept_rows(folder):
    return [row["extra_info"]["index"] for row in parquet.read_table(folder / "kept.parquet").to_pylist()]


def test_summary_by_hand_and_no_engine_for_a_finished_run(replay, no_engine):
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
    no_engine()
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
    summary, folder = replay([EASY, HARD], window=Window(40, Fraction(0), Fraction(1)))
    assert (summary.kept, summary.responses_drawn, summary.responses_saved) == (2, 0, 80)
    assert kept_rows(folder) == [0, 1] and sum(summary.histogram) == 0


def test_a_job_of_the_former_version_continues(replay, tmp_path):
    """Its journal, line for line; the rest is drawn, unless a setting is another one."""
    replay([EASY, FLIP], "whole", in_flight=1)
    settings, *lines = (tmp_path / "whole" / "journal.jsonl").read_text().splitlines(keepends=True)
    now, problem = json.loads(settings)["settings"], json.loads(lines[0])["problem"]
    recorded = {
        **{"data": now["data"], "model": "recorded", "responses_from": now["responses_from"], "dtype": "fp16"},
        **{"responses_per_problem": 40, "low": "1/5", "high": "4/5", "reward": "verl", "correct_at": 1.0},
        **{"max_prompt_length": 1024, "max_response_length": 6976, "temperature": 1.0, "top_p": 1.0, "seed": 0},
    }
    former = json.dumps({"settings": recorded}) + "\n"
    former += f'{{"problem": "{problem}", "response": 0, "correct": true, "tokens": 10}}\n'
    (tmp_path / "former").mkdir()
    (tmp_path / "former" / "journal.jsonl").write_text(former)
    summary, folder = replay([EASY, FLIP], "former", in_flight=1)
    assert summary.kept == 1 and (folder / "journal.jsonl").read_text().startswith(former)
    assert summary.responses_drawn == len(lines)
    with pytest.raises(ConfigurationError, match="low: '1/5' there, '0' now"):
        replay([EASY, FLIP], "former", Window(40, Fraction(0), Fraction(4, 5)))


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_prompt_length": 8}, "--max-prompt-length 8: every prompt is longer. Allowed: .* or more"),
        ({"recorded": "nowhere.jsonl"}, "--responses nowhere.jsonl: no such file"),
        ({"engines": 2}, "--engines 2 needs --ray-address"),
        ({"ray_address": "local", "recorded": "x"}, "needs no --ray-address"),
    ],
)
def test_what_cannot_work_is_refused_before_vllm_loads(tmp_path, row, write_rows, no_engine, changes, words):
    data = write_rows(tmp_path / "data.jsonl", [row(n, data_source="math_dapo") for n in range(2)])
    values = {"data": data, "model": "tiny:qwen3", "output": tmp_path / "out", "window": Window(), **changes}
    no_engine()
    with pytest.raises(ConfigurationError, match=words):
        build_sanity_set(Options(**values), Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_recorded_responses_that_run_out_are_named(replay):
    with pytest.raises(ConfigurationError, match="response 10 to problem .* is not in it"):
        replay([FLIP[:10]], window=Window(40))


@pytest.mark.parametrize("line", [{"problem": "a"}, {"problem": "a", "response": 0, "tokens": 3, "correct": "yes"}])
def test_recorded_lines_that_are_not_responses_are_named(tmp_path, write_rows, line):
    with pytest.raises(ConfigurationError, match="line 1"):
        RecordedEngine(write_rows(tmp_path / "r.jsonl", [line]))


def test_recorded_text_is_judged_by_the_reward_and_kept_if_asked(tmp_path, row, write_rows):
    data = write_rows(tmp_path / "data.jsonl", [row(1, data_source="math_dapo")])
    name, texts = read_data_set(data).problems[0].identifier, [f"It is \\boxed{{{number}}}." for number in range(4)]
    lines = [{"problem": name, "response": index, "tokens": 3, "text": text} for index, text in enumerate(texts)]
    values = {"data": data, "model": "recorded", "recorded": write_rows(tmp_path / "r.jsonl", lines)}
    options = Options(**values, output=tmp_path / "out", window=Window(4), keep_text=True, early_stopping=False)
    assert build_sanity_set(options, Console(quiet=True)).kept == 1
    journal = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()[1:]]
    assert [(line["text"], line["correct"]) for line in journal] == [
        *zip(texts, [False, False, True, False], strict=True)
    ]
