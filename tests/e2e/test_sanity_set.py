"""The sanity set of the arithmetic model with real vLLM, in FP16: however it is batched, the same responses."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def verl_precision(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "verl_precision.cli", *arguments], check=True, timeout=900)


def test_the_same_responses_however_they_are_batched(tmp_path):
    task = tmp_path / "task"
    verl_precision("arithmetic", str(task))
    problems = task / "problems.jsonl"
    problems.write_text("".join(problems.read_text().splitlines(keepends=True)[::8]))
    runs = []
    for in_flight in ("512", "40"):
        folder = tmp_path / in_flight
        verl_precision(
            "sanity-set",
            str(problems),
            *("--model", str(task / "model"), "--output", str(folder), "--in-flight", in_flight),
            *("--reward", "pkg://verl_precision.arithmetic.reward"),
            *("--max-prompt-length", "8", "--max-response-length", "8"),
        )
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
        responses = {(line["problem"], line["response"]): (line["correct"], line["tokens"]) for line in lines}
        content = json.loads((folder / "summary.json").read_text())
        runs.append((responses, {name: value["verdict"] for name, value in content["problems"].items()}, content))
    (first, verdicts, summary), (second, same_verdicts, _) = runs
    both = first.keys() & second.keys()
    assert len(both) > 1500
    assert sum(first[pair] == second[pair] for pair in both) / len(both) > 0.99  # a near-tie may fall the other way
    assert sum(verdicts[name] == same_verdicts[name] for name in verdicts) >= len(verdicts) - 2
    assert summary["summary"]["kept"] >= 5
    assert summary["summary"]["responses_saved"] > 0
