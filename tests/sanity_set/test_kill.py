"""kill -9 in the middle of a run, and the same command again: nothing is lost, and nothing is drawn twice.

The run is a real process. Its source replays recorded responses, a few at a time; before each batch it says through
one pipe that it is about to hand it over, and waits for leave through another. So the test kills it at a known place
without a clock.
"""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
from pyarrow import parquet
from rich.console import Console

from verl_precision.sampling.journal import read_lines
from verl_precision.sanity_set import session

SCRIPT = """
import os, sys
from pathlib import Path
from rich.console import Console
from verl_precision.sanity_set import session
from verl_precision.sanity_set.recorded import RecordedEngine
from verl_precision.sanity_set.verdict import Window

folder, say, hear = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Throttled(RecordedEngine):
    def submit(self, requests):
        with open(folder / "submitted.log", "a") as log:
            log.writelines(f"{r.problem} {r.response}\\n" for r in requests)
        super().submit(requests)

    def poll(self):
        os.write(say, b".")
        if not os.read(hear, 1):
            raise SystemExit("the test is gone")
        return [self._waiting.popleft() for _ in range(min(5, len(self._waiting)))]

session.RecordedEngine = Throttled
session.build_sanity_set(
    session.Options(data=folder / "data.jsonl", model="recorded", output=folder / "out", window=Window(),
                    recorded=folder / "recorded.jsonl", in_flight=12, reward=str(folder / "reward.py")),
    Console(quiet=True),
)
"""


class Run:
    """The process, and its two pipes."""

    def __init__(self, folder):
        self._said, say = os.pipe()
        hear, self._tell = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(say), str(hear)], pass_fds=(say, hear)
        )
        os.close(say)
        os.close(hear)

    def give_leave(self, batches):
        """Let it hand over that many batches; return how many it did before it ended."""
        for done in range(batches):
            if not os.read(self._said, 1):
                return done
            os.write(self._tell, b".")
        return batches

    def kill(self):
        """kill -9 once it asks for the next batch: what it was given before is counted, what it holds is not."""
        assert os.read(self._said, 1)
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(60) == -signal.SIGKILL
        os.close(self._said)
        os.close(self._tell)


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
    recorded = record(tmp_path / "recorded.jsonl", data, verdicts)
    journal, submitted = tmp_path / "out" / "journal.jsonl", tmp_path / "submitted.log"
    counted: list[tuple[str, int]] = []
    for batches in (9, 7):
        submitted.unlink(missing_ok=True)
        run = Run(tmp_path)
        assert run.give_leave(batches) == batches
        run.kill()
        if torn:  # as if killed within the write itself
            journal.write_bytes(journal.read_bytes()[:-9])
        on_disk = pairs(journal.read_bytes())
        assert on_disk[: len(counted)] == counted, "lost"
        assert len(on_disk) == len(counted) + 5 * batches - torn
        asked = [line.split() for line in submitted.read_text().splitlines()]
        assert not {(problem, int(response)) for problem, response in asked} & set(counted), "drawn twice"
        counted = on_disk

    options = {"data": data, "model": "recorded", "window": session.Window(), "recorded": recorded, "in_flight": 1}
    options |= {"reward": str(tmp_path / "reward.py"), "output": tmp_path / "out"}
    session.build_sanity_set(session.Options(**options), Console(quiet=True))
    final = pairs(journal.read_bytes())
    assert len(set(final)) == len(final) == len(list(read_lines(journal))) - 1
    assert final[: len(counted)] == counted
    kept = [line["extra_info"]["index"] for line in parquet.read_table(tmp_path / "out/kept.parquet").to_pylist()]
    assert kept == [index for index, row in enumerate(verdicts) if 8 <= sum(row) <= 32]
