"""The command line: one line of error, exit 1, and no engine."""

import pytest
from typer.testing import CliRunner

from verl_precision.cli import app


@pytest.fixture
def invoke(tmp_path, row, write_rows, record):
    data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(3)])
    flips = [[index % 2 == 0 for index in range(40)]] * 3
    recorded = record(tmp_path / "recorded.jsonl", data, flips)

    def run(*changes: str):
        arguments = [str(data), "--model", "m", "--output", str(tmp_path / "out"), "--responses", str(recorded)]
        result = CliRunner().invoke(app, ["sanity-set", *arguments, *changes])
        return result.exit_code, " ".join(result.output.split())

    return run


def test_replays_says_what_it_saved_and_resumes_with_shares_written_otherwise(invoke):
    code, text = invoke("--in-flight", "1", "--low", "20%", "--high", "4/5")
    assert code == 0, text
    assert "3/3 problems decided, 3 kept, 48 responses" in text
    assert "72 (60%)" in text  # 24 of 40 each
    code, text = invoke("--low", "0.2", "--high", "0.8")
    assert code == 0 and "resuming: 48 responses are in the journal" in text
