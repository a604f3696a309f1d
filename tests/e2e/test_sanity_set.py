"""The arithmetic model with real vLLM: its sanity set and its accuracy, killed and continued: the same responses."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from verl_precision.tools.jobs.problems import read_data_set

SECONDS = 600  # for one command, at most


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "verl_precision.cli", *arguments]


def sanity_set(task: Path, folder: Path, in_flight: int) -> list[str]:
    return command(
        *("sanity-set", str(task / "problems.jsonl"), "--model", str(task / "model"), "--output", str(folder)),
        *("--in-flight", str(in_flight), "--reward", "recipes/sanity_arithmetic/reward.py"),
        *("--max-prompt-tokens", "8", "--max-response-tokens", "8", "--keep-text"),
    )


def kill_when(ready: Callable[[], bool], arguments: list[str], journal: Path) -> bytes:
    """Start a command; once it is ready, kill -9 it and vLLM's engine, its child. Return the journal's whole lines."""
    process = subprocess.Popen(arguments)
    ours = [psutil.Process(process.pid)]
    try:
        end = time.monotonic() + SECONDS
        while not ready():
            assert time.monotonic() < end, f"not ready after {SECONDS} s"
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"ended by itself, exit code {process.wait(timeout=0.1)}")
    finally:
        with suppress(psutil.NoSuchProcess):
            ours += ours[0].children(recursive=True)
        for each in ours:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        status = process.wait(SECONDS)
    assert status == -signal.SIGKILL
    assert len(ours) > 1, "vLLM's engine is a process of its own"
    psutil.wait_procs(ours, timeout=60)
    content = journal.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def read(folder: Path) -> tuple[list[tuple[str, int]], dict, dict[str, str], dict]:
    """Return pairs (problem, response) in order, what came of each, verdicts, and the summary."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
    pairs = [(line["problem"], line["response"]) for line in lines]
    found = [(line["correct"], line["tokens"], line["text"]) for line in lines]
    content = json.loads((folder / "summary.json").read_text())
    verdicts = {name: value["verdict"] for name, value in content["problems"].items()}
    return pairs, dict(zip(pairs, found, strict=True)), verdicts, content["summary"]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Folder with the model, and every eighth of its problems."""
    folder = tmp_path_factory.mktemp("arithmetic") / "task"
    subprocess.run([sys.executable, "recipes/sanity_arithmetic/make_task.py", str(folder)], check=True, timeout=SECONDS)
    problems = folder / "problems.jsonl"
    problems.write_text("".join(problems.read_text().splitlines(keepends=True)[::8]))
    return folder


@pytest.fixture(scope="module")
def whole(task) -> Path:
    """Folder of the sanity set."""
    subprocess.run(sanity_set(task, task.parent / "whole", 512), check=True, timeout=SECONDS)
    return task.parent / "whole"


def test_the_same_responses_however_they_are_batched_and_killed(tmp_path, task, whole):
    killed = tmp_path / "killed"
    journal = killed / "journal.jsonl"
    arguments = sanity_set(task, killed, 40)
    before = kill_when(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 300, arguments, journal)
    assert not (killed / "summary.json").exists() and not (killed / "kept.parquet").exists()
    subprocess.run(arguments, check=True, timeout=SECONDS)

    after = journal.read_bytes()
    assert after.startswith(before), "lost"
    assert after.count(b"\n") > before.count(b"\n") >= 300
    pairs, first, verdicts, summary = read(whole)
    resumed_pairs, second, resumed_verdicts, resumed_summary = read(killed)
    for drawn in (pairs, resumed_pairs):
        assert len(set(drawn)) == len(drawn), "drawn twice"
    assert resumed_summary["responses_drawn"] == len(resumed_pairs)

    both = first.keys() & second.keys()
    assert len(both) > 1500
    assert sum(first[pair] == second[pair] for pair in both) / len(both) > 0.99  # a near-tie may fall the other way
    assert sum(verdicts[name] == resumed_verdicts[name] for name in verdicts) >= len(verdicts) - 2
    assert summary["kept"] >= 5
    assert summary["responses_saved"] > 0


@pytest.mark.matrix
def test_the_accuracy_in_two_dtypes_is_that_of_the_responses_of_the_sanity_set(tmp_path, task, whole):
    """Going on after a kill, with a real vLLM: the test above; the accuracies: tests/tools/evaluate/test_evaluate.py.

    At the sanity set's temperature FP16 draws its responses; a context of 7 sees two tokens of them."""
    evaluated, total = tmp_path / "evaluated", 102 * 8
    evaluate = command(
        *(
            "evaluate",
            "--model",
            str(task / "model"),
            "--data",
            str(task / "problems.jsonl"),
            "--output",
            str(evaluated),
        ),
        *("--dtype", "fp16", "--dtype", "bf16", "--responses", "8", "--context", "16", "--context", "7"),
        *("--temperature", "1", "--top-p", "1", "--reward", "recipes/sanity_arithmetic/reward.py", "--keep-text"),
    )
    journal, second_engine = evaluated / "journal.jsonl", evaluated / "logs" / "sample-bf16-0.log"
    before = kill_when(second_engine.exists, evaluate, journal)
    assert before.count(b"\n") == 1 + total and not (evaluated / "summary.json").exists()
    subprocess.run(evaluate, check=True, timeout=SECONDS)
    after = journal.read_bytes()
    assert after.startswith(before), "lost"

    drawn: dict[str, dict] = {"fp16": {}, "bf16": {}}
    for line in map(json.loads, after.splitlines()[1:]):
        drawn[line["dtype"]][line["problem"], line["response"]] = line
    assert len(drawn["fp16"]) == len(drawn["bf16"]) == total and after.count(b"\n") == 1 + 2 * total, "each once"
    first = read(whole)[1]
    both = first.keys() & drawn["fp16"].keys()
    assert len(both) > 700
    assert sum(first[key][2] == drawn["fp16"][key]["text"] for key in both) / len(both) > 0.99
    truths = {problem.identifier: problem.ground_truth for problem in read_data_set(task / "problems.jsonl").problems}
    for lines in drawn.values():
        for (problem, _), line in lines.items():
            assert line["correct"] == [line["text"] == truths[problem], line["text"][:2] == truths[problem]]

    content = json.loads((evaluated / "summary.json").read_text())
    found = {(each["dtype"], each["context"]): each for each in content["results"]}
    for (dtype, context), each in found.items():
        right = [line["correct"][0 if context == 16 else 1] for line in drawn[dtype].values()]
        assert each["average"] == pytest.approx(sum(right) / total)
    assert found["fp16", 16]["truncated"] == 0 and found["fp16", 7]["truncated"] > 0.9
    (change,) = (each for each in content["differences"] if each["context"] == 16)
    assert abs(change["average"]) <= 4 * change["standard_error"]
    assert change["standard_error"] < found["fp16", 16]["standard_error"], "paired"
