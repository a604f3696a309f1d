"""The time in which the live page opens and shows a new row, in a real Chromium on this machine.

    python benchmarks/live_page.py
    python benchmarks/live_page.py --runs 5 --steps 5000 --repeats 5

`verl-precision watch` serves runs in a separate process. Opened: from the browser's navigation to the frame with the
first curves, and to the frame with the last. A new row: from the end of its write to the text of its step on the page.
The exit code is 1 if a median is above its limit, 1 s or 2 s. It needs Debian's chromium and chromium-driver.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests")]
import chromium  # noqa: E402
from made_runs import add, row, write_run  # noqa: E402

OPENED, NEW_ROW = 1.0, 2.0  # seconds
# Records in an open page the times at which curves were drawn in a frame, and at which the text of progress changed.
NOTES = """
window.frameNotes = []; window.stepNotes = {};
new MutationObserver(() => {
  const count = document.querySelectorAll("#curves .curve").length;
  if (count !== (window.frameNotes.at(-1) || [0])[0]) {
    const entry = [count, null];
    window.frameNotes.push(entry);
    requestAnimationFrame(() => requestAnimationFrame(() => { entry[1] = performance.now(); }));
  }
  const step = document.getElementById("progress-0")?.textContent.split(" ")[1];
  if (step && !(step in window.stepNotes)) window.stepNotes[step] = performance.timeOrigin + performance.now();
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def main() -> int:
    """Measure, print, and return the exit code."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--runs", type=int, default=5)
    given.add_argument("--steps", type=int, default=5000)
    given.add_argument("--repeats", type=int, default=5)
    asked = given.parse_args()
    if absent := chromium.missing():
        given.error(absent)
    with TemporaryDirectory() as name:
        folder = Path(name)
        metrics = [write_run(folder / "runs" / f"run_{run}", asked.steps, run) for run in range(asked.runs)]
        start = time.perf_counter()
        words = (sys.executable, "-m", "verl_precision.cli", "watch", str(folder / "runs"), "--port", "0")
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            url = server.stdout.readline().removeprefix("open ").strip()
            print(
                f"the server was ready after {time.perf_counter() - start:.2f} s, at a load of {os.getloadavg()[0]:.1f}"
            )
            with chromium.started(folder) as page:
                page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NOTES})
                first, last = zip(*(opened(page, url) for _ in range(asked.repeats + 1)), strict=True)
                delays = [new_row(page, metrics[0], asked.steps + n) for n in range(1, 2 * asked.repeats + 1)]
        finally:
            server.terminate()
            server.wait()
    size = f"{asked.runs} runs of {asked.steps:,} steps"
    say(f"{size}: first curves after", first[1:])
    say(f"{size}: last curves after", last[1:])
    say(f"{size}: a new row after", delays)
    return int(statistics.median(first[1:]) > OPENED or statistics.median(delays) > NEW_ROW)


def opened(page: chromium.Page, url: str) -> tuple[float, float]:
    """Return the seconds from navigation to the first frame with curves, and to the frame with the last curves."""
    page.open(url)
    page.wait("figures.size > 0 && [...figures.values()].every((figure) => figure.element.hidden || !figure.stale)")
    page.wait("frameNotes.every((entry) => entry[1])")
    frames = page.js("frameNotes.map((entry) => entry[1] / 1000)")
    return frames[0], frames[-1]


def new_row(page: chromium.Page, metrics: Path, step: int) -> float:
    """Return the seconds from a row's write to its step on the page."""
    time.sleep(0.37 * (step % 4))  # at another time between two requests of the page
    add(metrics, row(step))
    written = time.time()
    page.wait("arguments[0] in stepNotes", str(step))
    return float(page.js("stepNotes[arguments[0]] / 1000", str(step))) - written


def say(what: str, seconds: list[float]) -> None:
    each = ", ".join(f"{one:.2f}" for one in sorted(seconds))
    print(f"{what} {statistics.median(seconds):.2f} s ({each})")


if __name__ == "__main__":
    sys.exit(main())
