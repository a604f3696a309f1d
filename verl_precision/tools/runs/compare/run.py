"""A comparison from end to end: its folder, the runs of its grid, progress and results on the terminal, and the files.

The folder is new, or that of an interrupted comparison with the same command; with `--once` also of a finished one.
`comparison.json` has the command of a folder, and `base/owner.py` locks the folder while that command runs. A
comparison is finished when its `summary.json` has every run.
"""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from verl_precision.base.errors import CheckpointStateError, ConfigurationError, RunFailedError
from verl_precision.base.overrides import quoted
from verl_precision.base.owner import release, take
from verl_precision.base.signals import completed
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.tools.actions.rescue import read_rescue
from verl_precision.tools.checking.composing import read_recipe
from verl_precision.tools.runs.compare.grid import PlannedRun, preset_of
from verl_precision.tools.runs.compare.summary import PassBar, Summary, draw_comparison, ratios, summarise, table
from verl_precision.tools.runs.content import RunView, recorded_content
from verl_precision.tools.runs.fork_server import workers_forked_on_cpu
from verl_precision.tools.runs.launch import run_verl
from verl_precision.tools.runs.page import write_page
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.figures import write_png
from verl_precision.tools.show.tables import write_json

COMMAND, SUMMARY, FIGURE, REPORT = "comparison.json", "summary.json", "comparison.png", "report.html"
_REMEDY = "Move it away; its runs are then repeated."

logger = logging.getLogger("verl_precision.compare")


def command_of(recipe: Path, runs: Sequence[PlannedRun], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what identifies a comparison: the recipe and its text, the runs, settings, and installed versions."""
    paths = OmegaConf.select(read_recipe(recipe), "hydra.searchpath") or []
    # The recipes beside it and on its search path count, too, because the recipe may build on them.
    folders = [recipe.parent, *(Path(path.removeprefix("file://")) for path in paths if path.startswith("file://"))]
    files = [file for folder in folders for file in sorted(folder.glob("*.yaml"))]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    of_runs = {"runs": {run.name: list(run.overrides) for run in runs}, "overrides": list(overrides)}
    return {"recipe": str(recipe.resolve()), "digest": digest, **of_runs, "versions": installed_versions()}


@contextmanager
def comparison_folder(parent: Path, command: dict[str, Any], anew: bool = False, once: bool = False) -> Iterator[Path]:
    """Yield a new folder, or that of an interrupted (`once`: any) comparison with the same command; lock it."""
    for path in () if anew else sorted(parent.glob(f"*/{COMMAND}"), reverse=True):
        if _goes_on(path, command, once) and take(path.parent) is None:
            try:
                if _goes_on(path, command, once):  # again, now that this process has the lock
                    yield path.parent
                    return
            finally:
                release(path.parent)
    path = parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S") / COMMAND
    if path.parent.exists() or take(path.parent) is not None:
        remedy = "Wait a second, or give another --output."
        raise ConfigurationError(f"{path.parent} exists, and nothing is overwritten", remedy=remedy)
    try:
        write_json(path, command, replace=False)
        yield path.parent
    finally:
        release(path.parent)


def _goes_on(path: Path, command: dict[str, Any], once: bool) -> bool:
    try:
        recorded = read_state(path, dict[str, Any], _REMEDY)
    except CheckpointStateError as error:  # the command of the folder is not known
        logger.warning("an earlier comparison is ignored: %s", error)
        return False
    return recorded == command and (once or not seconds_of_runs(path.parent).keys() >= command["runs"].keys())


def seconds_of_runs(folder: Path) -> dict[str, float]:
    """Return the seconds of each finished run of a comparison, by the run's name."""
    return read_state(folder / SUMMARY, _seconds, _REMEDY) or {}


def _seconds(summary: Any) -> dict[str, float]:
    runs = ((PlannedRun(run["arm"], run["seed"], ()).name, run["seconds_total"]) for run in summary["runs"])
    return {name: checked(float, seconds) for name, seconds in runs}


def compare_runs(
    config: Path,
    runs: Sequence[PlannedRun],
    overrides: Sequence[str],
    folder: Path,
    console: Console,
    pass_bar: PassBar | None = None,
    parallel: int = 1,
) -> list[Summary]:
    """Run a recipe once for each arm and seed, `parallel` at a time, each with its own Ray; write the comparison.

    Runs in the folder's summary are not repeated; an interrupted run continues from its last checkpoint. If a run
    fails, no other run starts, and the runs in progress continue to their end.
    """
    finished = seconds_of_runs(folder)
    results = _results(runs, overrides, folder, finished)
    # If two runs share cores, their threads wait for each other in busy loops, which multiplies the CPU time.
    threads = max(1, (os.cpu_count() or 1) // parallel) if parallel > 1 else None
    failed, interrupted, errors = threading.Event(), threading.Event(), list[Exception]()

    def start(run: PlannedRun) -> float | None:
        if failed.is_set():
            return None
        checkpoints = folder / run.name / "checkpoints"
        chosen = [*overrides, *run.overrides, f"trainer.default_local_dir={quoted(checkpoints)}"]
        checkpoints.mkdir(parents=True, exist_ok=True)  # run_identity.py writes into it which run owns it
        try:
            tell = _teller(console, folder, run.name, interrupted)
            return run_verl(config, chosen, folder / run.name, tell, True, threads)
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
                        _write(folder, config.stem, *results, pass_bar)  # now, in case of an interrupt
                except Exception as error:
                    failed.set()
                    errors.append(error)
                    if any(other.running() for other in futures):
                        text = f"{futures[future].name} has failed; the others continue, then the reason is shown"
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
    """Return each finished run (a run that has `seconds`) and its summary, in the order of the plan."""
    found, summaries = list[Run](), list[Summary]()
    for run in runs:
        if run.name in seconds:
            (read,) = read_runs([folder / run.name])
            found.append(replace(read, name=run.name))
            about = {group: preset_of(group, [*overrides, *run.overrides]) for group in ("precision", "estimator")}
            of_run = {"seed": run.seed, "rescue": _rescued(folder / run.name), "verdict": RunView(read, 0).verdict}
            summaries.append(summarise(read.rows, seconds[run.name], run.arm, **about, **of_run))
    return found, summaries


def _rescued(run: Path) -> str:
    """Return in words that an alarm has continued the run of a folder in FP16; "" if none has."""
    found = read_rescue(run / "checkpoints")
    return "" if found is None else f"rescued at step {found.step} to {found.precision}"


def _write(folder: Path, title: str, runs: list[Run], summaries: list[Summary], pass_bar: PassBar | None) -> None:
    content: dict[str, Any] = {"runs": [asdict(summary) for summary in summaries], "ratios": ratios(summaries)}
    content |= {"command": sys.argv, "versions": installed_versions()}
    if pass_bar:
        content["pass_bar"] = {run.name: pass_bar.verdict(run.rows) for run in runs}
    write_json(folder / SUMMARY, content)
    shown = recorded_content(runs)
    write_png(folder / FIGURE, draw_comparison(shown), title)
    write_page(folder / REPORT, shown, force=True)


def _show(console: Console, folder: Path, runs: list[Run], summaries: list[Summary], pass_bar: PassBar | None) -> None:
    console.print(table(summaries))
    if pass_bar:
        console.print("\n".join(pass_bar.sentence(run.name, run.rows) for run in runs), highlight=False)
    run_folder = f"{folder}/<arm>" + ("/seed_<n>" if summaries[0].seed is not None else "")
    text = f"written: {FIGURE}, {REPORT} and {SUMMARY} in {folder}; metrics.jsonl and train.log in {run_folder}\n"
    text += f"next, what causes the gap of a run: verl-precision explain --run {run_folder}"
    text += "".join(f"\n{run.name}: {each.verdict}" for run, each in zip(runs, summaries, strict=True))
    console.print(text, highlight=False, soft_wrap=True)


def _teller(console: Console, folder: Path, name: str, interrupted: threading.Event) -> Callable[[str, float], None]:
    """Return a function that prints the progress of a run, from any thread: one line for each stage and step."""
    said, reached = "", 0

    def tell(stage: str, seconds: float) -> None:
        nonlocal said, reached
        if interrupted.is_set():
            raise KeyboardInterrupt  # Ctrl-C reaches only the main thread; this ends the run's processes
        if stage != said:
            said, former = stage, reached
            reached = int(stage.split()[1].partition("/")[0]) if stage.startswith("step ") else 0
            again = f"{_rescued(folder / name) or 'started again'}; " if reached < former else ""
            console.print(f"[{seconds:5.0f} s] {name}: {again}{said}", markup=False, highlight=False)

    return tell
