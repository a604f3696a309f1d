"""The time that the plugin adds to `import verl`, and the response time of the command line.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --repeats 7

The import is CPU time in clean interpreters, with the plugin and without. The commands are wall-clock time, beside
verl's own command that prints a config. All take turns, after one round that fills the page cache.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from measure import Record, alternate, parser, record, report

ROOT = Path(__file__).parents[1]
IMPORT = "import time; start = time.process_time(); import verl; print(time.process_time() - start)"
OURS = (sys.executable, "-m", "verl_precision.cli")
MAIN = (sys.executable, "-m", "verl.trainer.main_ppo")


def parse() -> argparse.Namespace:
    return parser(__doc__, repeats=3).parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    imported("auto")
    without, with_plugin = zip(*((imported("none"), imported("auto")) for _ in range(arguments.repeats)), strict=True)
    yield record("import verl, CPU time", "without the plugin", "s", list(with_plugin), list(without))
    calls = {
        "help": (*OURS, "--help"),
        "check": (*OURS, "check", "recipes/quickstart/quickstart.yaml"),
        "verl's": (*MAIN, "--config-dir", "recipes/quickstart", "--config-name", "quickstart", "--cfg", "job"),
    }
    times = alternate({name: lambda words=words: run(words) for name, words in calls.items()}, arguments.repeats)
    seconds = {name: [time / 1e3 for time in found] for name, found in times.items()}
    peer, least = "main_ppo --cfg job, which checks nothing", min(without)
    yield record("verl-precision --help", peer, "s", seconds["help"], seconds["verl's"], ours_at_most=1)
    limit = {"limit": "import verl, whose losses and trainers are checked", "least": least}
    yield record(
        "verl-precision check, quickstart", peer, "s", seconds["check"], seconds["verl's"], ours_at_most=8, **limit
    )


def imported(policy: str) -> float:
    """Return the CPU seconds of `import verl`, with a value of VERL_USE_EXTERNAL_PLUGINS."""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": policy}
    return float(run((sys.executable, "-c", IMPORT), environment))


def run(words: tuple[str, ...], environment: dict[str, str] | None = None) -> str:
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment).stdout


if __name__ == "__main__":
    report(records(given := parse()), given.json)
