"""kill -9 in the middle of a run, and the same command again: nothing is lost, and nothing is drawn twice."""

import json
import random
import signal
import subprocess
import sys

import pytest
from pyarrow import parquet

from verl_precision.sampling.journal import read_lines

# A process of its own replays recorded responses, five at a time. It kills itself when it is asked for one batch more
# than it may hand over: what it handed over before is counted, what it holds is not.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from verl_precision.sanity_set import session
from verl_precision.sanity_set.recorded import RecordedEngine
from verl_precision.sanity_set.verdict import Window

folder, batches = Path(sys.argv[1]), int(sys.argv[2])

class Mortal(RecordedEngine):
    def submit(self, requests):
        with open(folder / "submitted.log", "a") as log:
            log.writelines(f"{r.problem} {r.response}\\n" for r in requests)
        super().submit(requests)

    def poll(self):
        global batches
        batches -= 1
        if batches < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [self._waiting.popleft() for _ in range(min(5, len(self._waiting)))]

session.RecordedEngine = Mortal
session.build_sanity_set(
    session.Options(data=folder / "data.jsonl", model="recorded", output=folder / "out", window=Window(),
                    recorded=folder / "recorded.jsonl", in_flight=12, reward=str(folder / "reward.py")),
    Console(quiet=True),
)
"""


def pairs(content: bytes) -> list[tuple[str, int]]:
    """Return problem and response of each complete line of a journal."""
    lines = map(json.loads, content[: content.rfind(b"\n")].splitlines()[1:])
    return [(line["problem"], line["response"]) for line in lines]


@pytest.mark.parametrize("torn", [False, True])
def test_killed_twice_and_resumed(tmp_path, row, write_rows, record, torn):
    """Eight problems of all difficulties, 40 recorded responses each; their recorded verdicts need no reward."""
    (tmp_path / "reward.py").write_text("def compute_score(**values): return 0.0")
    data = write_rows(tmp_path / "data.jsonl", [row(number) for number in range(8)])
    generator = random.Random(1)
    verdicts = [[generator.random() < number / 7 for _ in range(40)] for number in range(8)]
    record(tmp_path / "recorded.jsonl", data, verdicts)
    journal, submitted = tmp_path / "out" / "journal.jsonl", tmp_path / "submitted.log"
    counted: list[tuple[str, int]] = []
    for batches in (9, 7, 1000):
        submitted.unlink(missing_ok=True)
        ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), str(batches)], timeout=180).returncode
        assert ended == (0 if batches == 1000 else -signal.SIGKILL)
        if torn and ended:  # as if killed within the write itself
            journal.write_bytes(journal.read_bytes()[:-9])
        on_disk = pairs(journal.read_bytes())
        assert on_disk[: len(counted)] == counted, "lost"
        assert not ended or len(on_disk) == len(counted) + 5 * batches - torn
        asked = [line.split() for line in submitted.read_text().splitlines()]
        assert not {(problem, int(response)) for problem, response in asked} & set(counted), "drawn twice"
        counted = on_disk
    assert len(set(counted)) == len(counted) == len(list(read_lines(journal))) - 1
    kept = [line["extra_info"]["index"] for line in parquet.read_table(tmp_path / "out/kept.parquet").to_pylist()]
    assert kept == [index for index, row in enumerate(verdicts) if 8 <= sum(row) <= 32]
