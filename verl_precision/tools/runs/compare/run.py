"""A comparison from end to end: checks, the runs of its grid, progress and results on the terminal."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from verl_precision.base.errors import RunFailedError
from verl_precision.base.overrides import quoted
from verl_precision.base.signals import completed
from verl_precision.tools.runs.compare.folder import SUMMARY
from verl_precision.tools.runs.compare.outputs import FIGURE, REPORT, Results
from verl_precision.tools.runs.compare.summary import PassBar, Summary, table
from verl_precision.tools.runs.fork_server import workers_forked_on_cpu
from verl_precision.tools.runs.grid import PlannedRun
from verl_precision.tools.runs.launch import Progress, run_verl


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
    results = Results(config, runs, overrides, folder, pass_bar)
    todo = [run for run in runs if run.name not in results.finished()]
    # Threads of two runs on one core wait for each other actively, at several times the work.
    threads = max(1, (os.cpu_count() or 1) // parallel) if parallel > 1 else None
    failed, interrupted = threading.Event(), threading.Event()

    def start(run: PlannedRun) -> None:
        if failed.is_set():
            return
        checkpoints = folder / run.name / "checkpoints"
        chosen = [*overrides, *run.overrides, f"trainer.default_local_dir={quoted(checkpoints)}"]
        checkpoints.mkdir(parents=True, exist_ok=True)  # whose they are is written into it: run_identity.py
        tell = _teller(console, run.name, interrupted)
        try:
            results.add(run, run_verl(config, chosen, folder / run.name, tell, True, threads))
        except BaseException:
            failed.set()
            raise

    errors: list[BaseException] = []
    with workers_forked_on_cpu(), ThreadPoolExecutor(parallel) as pool:
        try:
            futures = {pool.submit(start, run): run for run in todo}
            for handled, future in enumerate(completed(futures), start=1):
                if (error := future.exception()) is not None:
                    errors.append(error)
                    if any(other.running() for other in futures):
                        text = f"{futures[future].name} has failed; what is under way goes on, then the reason is shown"
                        console.print(text, highlight=False, soft_wrap=True)
                # After each run, so that an interrupted comparison leaves what it had.
                if handled == sum(other.done() for other in futures):
                    results.draw()
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise errors[0] if len(errors) == 1 else RunFailedError("\n".join(map(str, errors)))
    results.draw()
    _show(results, console)
    return results.summaries()


def _show(results: Results, console: Console) -> None:
    console.print(table(results.summaries()))
    if results.pass_bar:
        for name, run in results.finished().items():
            console.print(results.pass_bar.sentence(name, run.rows), highlight=False)
    names = {"figure": FIGURE, "report": REPORT, "summary": SUMMARY}
    lines = [f"{what:8} {results.folder / name}" for what, name in names.items()]
    folder = "<precision>" if all(run.arm.name == run.arm.precision for run in results.runs) else "<arm>"
    folder += "/seed_<n>" if any(run.seed is not None for run in results.runs) else ""
    lines.append(f"metrics  {results.folder}/{folder}/metrics.jsonl, log train.log")
    lines.append(f"which cause makes a run's gap: verl-precision explain --run {results.folder}/{folder}")
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
