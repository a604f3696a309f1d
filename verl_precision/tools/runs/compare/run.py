"""A comparison from end to end: the runs of its grid, progress and results on the terminal, and the files of both."""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_precision.base.errors import RunFailedError
from verl_precision.base.overrides import quoted
from verl_precision.base.signals import completed
from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.compare.folder import SUMMARY, seconds_of_runs
from verl_precision.tools.runs.compare.grid import PlannedRun, preset_of
from verl_precision.tools.runs.compare.summary import PassBar, Summary, summarise, table, write_summary
from verl_precision.tools.runs.content import recorded_content
from verl_precision.tools.runs.figures import draw_comparison
from verl_precision.tools.runs.fork_server import workers_forked_on_cpu
from verl_precision.tools.runs.launch import Progress, run_verl
from verl_precision.tools.runs.page import write_page
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.figures import write_png

FIGURE, REPORT = "comparison.png", "report.html"


def compare_runs(
    config: Path,
    runs: Sequence[PlannedRun],
    overrides: Sequence[str],
    folder: Path,
    console: Console,
    pass_bar: PassBar | None = None,
    parallel: int = 1,
) -> list[Summary]:
    """Run a recipe once for each arm and seed, so many in parallel, each with a Ray of its own; write the comparison.

    Runs that the folder's summary has are not repeated; one that is there goes on from its last checkpoint.

    If a run fails, no other starts, those under way go on to their end, and finished runs stay in the folder.
    Ctrl-C is raised after every process of every run has ended.
    """
    finished = seconds_of_runs(folder)
    results = _results(runs, overrides, folder, finished)
    # Threads of two runs on one core wait for each other actively, at several times the work.
    threads = max(1, (os.cpu_count() or 1) // parallel) if parallel > 1 else None
    failed, interrupted, errors = threading.Event(), threading.Event(), list[Exception]()

    def start(run: PlannedRun) -> float | None:
        if failed.is_set():
            return None
        checkpoints = folder / run.name / "checkpoints"
        chosen = [*overrides, *run.overrides, f"trainer.default_local_dir={quoted(checkpoints)}"]
        checkpoints.mkdir(parents=True, exist_ok=True)  # whose they are is written into it: run_identity.py
        try:
            return run_verl(config, chosen, folder / run.name, _teller(console, run.name, interrupted), True, threads)
        except BaseException:
            failed.set()
            raise

    with workers_forked_on_cpu(), ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(start, run): run for run in runs if run.name not in finished}
        try:
            for future in completed(futures):
                try:
                    if (seconds := future.result()) is not None:
                        results = _results(runs, overrides, folder, {**finished, futures[future].name: seconds})
                        finished[futures[future].name] = seconds
                        _write(folder, config.stem, *results, pass_bar)  # an interrupted comparison leaves what it had
                except Exception as error:
                    failed.set()
                    errors.append(error)
                    if any(other.running() for other in futures):
                        text = f"{futures[future].name} has failed; what is under way goes on, then the reason is shown"
                        console.print(text, highlight=False, soft_wrap=True)
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise errors[0] if len(errors) == 1 else RunFailedError("\n".join(map(str, errors)))
    _show(console, folder, *results, pass_bar)
    return results[1]


def _results(
    runs: Sequence[PlannedRun], overrides: Sequence[str], folder: Path, seconds: Mapping[str, float]
) -> tuple[list[Run], list[Summary]]:
    """Return each run that has finished, in so many seconds, and its summary, in the order of the plan."""
    found, summaries = list[Run](), list[Summary]()
    for run in runs:
        if run.name in seconds:
            (read,) = read_runs([folder / run.name])
            found.append(replace(read, name=run.name))
            presets = {group: preset_of(group, [*overrides, *run.overrides]) for group in ("precision", "estimator")}
            summaries.append(summarise(read.rows, seconds[run.name], run.arm, seed=run.seed, **presets))
    return found, summaries


def _write(folder: Path, title: str, runs: list[Run], summaries: list[Summary], pass_bar: PassBar | None) -> None:
    about: dict[str, Any] = {"command": sys.argv, "versions": installed_versions()}
    if pass_bar:
        about["pass_bar"] = {run.name: pass_bar.verdict(run.rows) for run in runs}
    write_summary(folder / SUMMARY, summaries, **about)
    content = recorded_content(runs)
    write_png(folder / FIGURE, draw_comparison(content), title)
    write_page(folder / REPORT, content, force=True)


def _show(console: Console, folder: Path, runs: list[Run], summaries: list[Summary], pass_bar: PassBar | None) -> None:
    console.print(table(summaries))
    if pass_bar:
        console.print("\n".join(pass_bar.sentence(run.name, run.rows) for run in runs), highlight=False)
    run_folder = f"{folder}/<arm>" + ("/seed_<n>" if summaries[0].seed is not None else "")
    names = {"figure": FIGURE, "report": REPORT, "summary": SUMMARY}
    lines = [f"{what:8} {folder / name}" for what, name in names.items()]
    lines.append(f"metrics  {run_folder}/metrics.jsonl, log train.log")
    lines.append(f"which cause makes a run's gap: verl-precision explain --run {run_folder}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _teller(console: Console, name: str, interrupted: threading.Event) -> Callable[[Progress], None]:
    """Return what is to be called, in any thread, with the progress of a run: each stage and step is a line."""
    said = ""

    def tell(progress: Progress) -> None:
        nonlocal said
        if interrupted.is_set():
            raise KeyboardInterrupt  # Ctrl-C reaches the main thread only; here, it ends the run's processes
        former, said = said, progress.stage
        if progress.step:
            said = f"step {progress.step}/{progress.total_steps or '?'}"
        if said != former:
            console.print(f"[{progress.seconds:5.0f} s] {name}: {said}", markup=False, highlight=False)

    return tell
