"""From verdicts to files: the kept set, what was saved, resuming, and what is refused before an engine starts."""

import json
import re

import pytest
from pyarrow import parquet
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.evaluate.sanity_set import build_sanity_set
from verl_precision.tools.evaluate.settings import SanitySet
from verl_precision.tools.jobs.problems import read_data_set

EASY, HARD, FLIP = [True] * 40, [False] * 40, [index % 2 == 0 for index in range(40)]


@pytest.fixture
def drawn(tmp_path, row, write_rows, made_up, write_reward):
    """Write a data set whose responses have these verdicts and ten tokens each; return the options of a job on it."""

    def of(verdicts):
        data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(len(verdicts))])
        names = [problem.identifier for problem in read_data_set(data).problems]
        texts = {
            (name, n): str(right) for name, each in zip(names, verdicts, strict=True) for n, right in enumerate(each)
        }
        made_up.answer = lambda name, request: Response(*request.key, 10, texts[request.key])
        right = write_reward("return solution_str == 'True'")
        return {"data": data, "model": "tiny:qwen3", "output": tmp_path / "out", "reward": right}

    return of


@pytest.fixture
def build(drawn, tmp_path):
    """Build a sanity set from verdicts; returns the summary and the folder."""

    def run(verdicts, **options):
        job = SanitySet(**{**drawn(verdicts), "responses": len(verdicts[0]), **options})
        return build_sanity_set(job, Console(quiet=True)), tmp_path / "out"

    return run


def kept_rows(folder):
    return [row["extra_info"]["index"] for row in parquet.read_table(folder / "kept.parquet").to_pylist()]


def test_summary_by_hand(build):
    """In flight 1: 33 + 33 + 16 responses of 120; 10 tokens each."""
    summary, folder = build([EASY, HARD, FLIP], in_flight=1)
    assert kept_rows(folder) == [2]
    assert (summary["kept"], summary["too_easy"], summary["too_hard"]) == (1, 1, 1)
    assert (summary["responses_drawn"], summary["responses_saved"]) == (82, 38)
    assert summary["tokens_drawn"] == 820
    assert summary["histogram"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    content = json.loads((folder / "summary.json").read_text())
    assert content["summary"]["kept"] == 1
    assert [p["verdict"] for p in content["problems"].values()] == ["dropped", "dropped", "kept"]


def test_the_command_says_what_it_saved_and_resumes_with_shares_written_otherwise(drawn, typed):
    given = drawn([FLIP] * 3)
    words = ["sanity-set", given.pop("data"), *(word for name in given for word in (f"--{name}", given[name]))]
    first, again = ("--low", "1/5", "--high", "4/5"), ("--low", "0.2", "--high", "0.8")
    code, shown = typed(*words, *first, "--in-flight", "1")
    assert code == 0 and re.search("3/3 problems decided, 48 responses.*responses saved *│ *72", shown), shown
    code, shown = typed(*words, *again)
    assert code == 0 and "resuming: 48 responses are in the journal" in shown


def test_a_window_that_keeps_everything_draws_nothing(build):
    summary, folder = build([EASY, HARD], low=0, high=1)
    assert (summary["kept"], summary["responses_drawn"], summary["responses_saved"]) == (2, 0, 80)
    assert kept_rows(folder) == [0, 1] and sum(summary["histogram"]) == 0


def test_a_window_that_keeps_nothing_shows_the_histogram(build, tmp_path):
    with pytest.raises(ConfigurationError, match=r"keeps none of 3 problems.*: 1, 0, 0, 0, 0, 0, 0, 0, 0, 2\. Choose"):
        build([EASY, EASY, HARD])
    assert (tmp_path / "out" / "summary.json").is_file()
    assert not (tmp_path / "out" / "kept.parquet").exists()


def test_the_text_is_kept_if_asked(build):
    _, folder = build([HARD[:4]], keep_text=True, low=0, high=0, in_flight=1)
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
    assert [(line["text"], line["correct"]) for line in journal] == [("False", False)] * 4
