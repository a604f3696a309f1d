"""The command line: one line of error, exit 1, and no engine."""

import pytest
from typer.testing import CliRunner

from verl_precision.cli import app

runner = CliRunner()


@pytest.fixture
def invoke(tmp_path, row, write_rows, record):
    data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(3)])
    flips = [[index % 2 == 0 for index in range(40)]] * 3
    recorded = record(tmp_path / "recorded.jsonl", data, flips)

    def run(*changes: str):
        arguments = [str(data), "--model", "m", "--output", str(tmp_path / "out"), "--responses", str(recorded)]
        return runner.invoke(app, ["sanity-set", *arguments, *changes])

    return run


def test_replays_and_says_what_it_saved(invoke):
    result = invoke("--in-flight", "1")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "3/3 problems decided, 3 kept, 48 responses" in text
    assert "72 (60%)" in text  # 24 of 40 each


def test_shares_are_exact_and_come_in_three_ways(invoke, tmp_path):
    assert invoke("--low", "20%", "--high", "4/5").exit_code == 0
    assert '"low": "1/5"' in (tmp_path / "out" / "journal.jsonl").read_text()
    assert invoke("--low", "0.2", "--high", "0.8").exit_code == 0  # the same settings, so it resumes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--low", "0.9"], "error: --low 0.9 --high 0.8: allowed: 0 <= low <= high <= 1"),
        (["--dtype", "half"], "error: --dtype half: this cannot work. Allowed: 'fp16', 'bf16' or 'fp32'"),
        (["--reward", "nowhere.py"], "error: --reward nowhere.py: no file"),
        (["--reward", "pkg://verl_precision.rewrad"], "there is no module verl_precision.rewrad"),
        (["--low", "0.6", "--high", "0.7"], "keeps none of 3 problems"),
    ],
)
def test_refuses_in_one_line_with_exit_1(invoke, arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_share_that_is_no_number(invoke):
    result = invoke("--low", "few")
    assert result.exit_code == 2 and "a share such as 0.2, 20% or 1/5" in " ".join(result.output.split())
