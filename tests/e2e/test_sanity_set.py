"""The sanity set of the arithmetic model with real vLLM, in FP16: batched otherwise, and killed, the same responses."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

SECONDS = 600  # for one command, at most


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "verl_precision.cli", *arguments]


def sanity_set(task: Path, folder: Path, in_flight: int) -> list[str]:
    return command(
        *("sanity-set", str(task / "problems.jsonl"), "--model", str(task / "model"), "--output", str(folder)),
        *("--in-flight", str(in_flight), "--reward", "recipes/sanity_arithmetic/reward.py"),
        *("--max-prompt-length", "8", "--max-response-length", "8", "--keep-text"),
    )


def kill_at(arguments: list[str], journal: Path, lines: int) -> bytes:
    """Start a command; kill -9 it and vLLM's engine, its child, once the journal is that long.

    Returns:
        The journal's complete lines at its death.
    """
    process = subprocess.Popen(arguments)
    ours = [psutil.Process(process.pid)]
    try:
        end = time.monotonic() + SECONDS
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
            assert time.monotonic() < end, f"no {lines} lines after {SECONDS} s"
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


def test_the_same_responses_however_they_are_batched_and_killed(tmp_path):
    task, whole, killed = tmp_path / "task", tmp_path / "whole", tmp_path / "killed"
    subprocess.run([sys.executable, "recipes/sanity_arithmetic/make_task.py", str(task)], check=True, timeout=SECONDS)
    problems = task / "problems.jsonl"
    problems.write_text("".join(problems.read_text().splitlines(keepends=True)[::8]))

    subprocess.run(sanity_set(task, whole, 512), check=True, timeout=SECONDS)
    before = kill_at(sanity_set(task, killed, 40), killed / "journal.jsonl", lines=300)
    assert not (killed / "summary.json").exists() and not (killed / "kept.parquet").exists()
    subprocess.run(sanity_set(task, killed, 40), check=True, timeout=SECONDS)

    after = (killed / "journal.jsonl").read_bytes()
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
