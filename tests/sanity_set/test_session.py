"""From verdicts to files: the kept set, what was saved, resuming, and what is refused before an engine starts."""

import json
import random

import pytest
from pyarrow import parquet
from rich.console import Console

from verl_precision.errors import ConfigurationError
from verl_precision.sanity_set.session import Options, build_sanity_set
from verl_precision.sanity_set.verdict import Window

EASY, HARD, FLIP = [True] * 40, [False] * 40, [index % 2 == 0 for index in range(40)]


def kept_rows(folder):
    return [row["extra_info"]["index"] for row in parquet.read_table(folder / "kept.parquet").to_pylist()]


def test_summary_by_hand(replay):
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


@pytest.mark.parametrize("in_flight", [1, 7, 64, 10_000])
def test_same_kept_set_with_and_without_early_stopping(replay, in_flight):
    generator = random.Random(3)
    accuracies = [generator.random() for _ in range(30)]
    verdicts = [[generator.random() < accuracy for _ in range(40)] for accuracy in accuracies]
    early, first = replay(verdicts, "early", in_flight=in_flight)
    full, second = replay(verdicts, "full", in_flight=in_flight, early_stopping=False)
    expected = [index for index, row in enumerate(verdicts) if 8 <= sum(row) <= 32]
    assert kept_rows(first) == kept_rows(second) == expected
    assert full.responses_drawn == 1200 == early.responses_drawn + early.responses_saved
    assert early.responses_drawn < 900 or in_flight > 900


def test_a_finished_run_starts_no_engine_again(replay, monkeypatch):
    summary, folder = replay([EASY, FLIP], in_flight=1)
    before = (folder / "journal.jsonl").read_bytes()
    monkeypatch.setattr("verl_precision.sanity_set.session._engine", lambda options: pytest.fail("engine started"))
    again, _ = replay([EASY, FLIP], in_flight=64)  # how many are in flight is no part of the experiment
    assert again == summary
    assert (folder / "journal.jsonl").read_bytes() == before


def test_a_job_of_the_former_version_continues(replay, tmp_path):
    """Its journal, line for line; the rest is drawn."""
    replay([EASY, FLIP], "whole", in_flight=1)
    settings, *lines = (tmp_path / "whole" / "journal.jsonl").read_text().splitlines(keepends=True)
    recorded = {
        **{"data": "D", "model": "recorded", "responses_from": "R", "dtype": "fp16", "responses_per_problem": 40},
        **{"low": "1/5", "high": "4/5", "reward": "verl", "correct_at": 1.0, "max_prompt_length": 1024},
        **{"max_response_length": 6976, "temperature": 1.0, "top_p": 1.0, "seed": 0},
    }
    now = json.loads(settings)["settings"]
    recorded |= {name: now[name] for name in ("data", "responses_from")}
    problem = json.loads(lines[0])["problem"]
    former = json.dumps({"settings": recorded}) + "\n"
    former += f'{{"problem": "{problem}", "response": 0, "correct": true, "tokens": 10}}\n'
    (tmp_path / "former").mkdir()
    (tmp_path / "former" / "journal.jsonl").write_text(former)
    summary, folder = replay([EASY, FLIP], "former", in_flight=1)
    assert summary.kept == 1 and (folder / "journal.jsonl").read_text().startswith(former)
    assert summary.responses_drawn == len(lines)


def test_a_result_that_somebody_else_made_is_left_alone(replay, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"it has summary.json and no journal.jsonl.*Nothing was written"):
        replay([EASY, FLIP])
    assert (tmp_path / "out" / "summary.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"window": Window(40, 0, Window().high)}, "low: '1/5' there, '0' now"),
        ({"dtype": "bf16"}, "dtype: 'fp16' there, 'bf16' now"),
    ],
)
def test_resuming_with_other_settings_is_refused(replay, changes, words):
    replay([EASY, FLIP])
    with pytest.raises(ConfigurationError, match=words):
        replay([EASY, FLIP], **changes)


def test_a_window_that_keeps_nothing_shows_the_histogram(replay, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        replay([EASY, EASY, HARD])
    assert "keeps none of 3 problems" in str(caught.value)
    assert "  0- 10%       1  ####################\n" in str(caught.value)
    assert f" 90-100%       2  {'#' * 40}\n" in str(caught.value)
    assert (tmp_path / "out" / "summary.json").is_file()
    assert not (tmp_path / "out" / "kept.parquet").exists()


def test_recorded_responses_that_run_out_are_named(replay):
    with pytest.raises(ConfigurationError, match="response 10 to problem .* is not in it"):
        replay([FLIP[:10]], window=Window(40))


def options(tmp_path, row, write_rows, **changes):
    data = write_rows(tmp_path / "data.jsonl", [row(n, data_source="math_dapo") for n in range(2)])
    return Options(**{"data": data, "model": "m", "output": tmp_path / "out", "window": Window(), **changes})


def test_a_model_that_is_not_there_is_refused_before_vllm_loads(tmp_path, row, write_rows, monkeypatch):
    monkeypatch.setattr("verl_precision.sanity_set.session._engine", lambda options: pytest.fail("engine started"))
    with pytest.raises(ConfigurationError, match="no such folder, and not a hub name"):
        build_sanity_set(options(tmp_path, row, write_rows, model="no/such/folder"), Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_prompts_that_are_too_long(tmp_path, row, write_rows, monkeypatch):
    from verl_precision.tiny_model import cached_tiny_model

    model = str(cached_tiny_model("qwen3"))
    monkeypatch.setattr("verl_precision.sanity_set.session._engine", lambda options: pytest.fail("engine started"))
    with pytest.raises(ConfigurationError, match="--max-prompt-length 8: every prompt is longer. Allowed: .* or more"):
        build_sanity_set(options(tmp_path, row, write_rows, model=model, max_prompt_length=8), Console(quiet=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "--dtype float16: this cannot work. Allowed: 'fp16', 'bf16' or 'fp32'"),
        ({"engines": 2}, "--engines 2 needs --ray-address"),
        ({"ray_address": "local", "recorded": "x"}, "needs no --ray-address"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, row, write_rows, changes, words):
    with pytest.raises(ConfigurationError, match=words):
        options(tmp_path, row, write_rows, **changes)
