"""The verbs `compare`, `report`, `watch` and `recipes`: make runs, and look at them."""

import importlib.util
import json
import shlex
import shutil
import socket
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from verl_precision.base.errors import ConfigurationError, after_ctrl_c
from verl_precision.base.files import new_folder, shipped_folder
from verl_precision.cli.verb import FIGURES, console, errors, say, verb

Names = list[str] | None
_DIAGNOSIS = ("name", "path", "verdict", "alarms", "problem")  # of `diagnose --json`


@verb("A run", needs=(*FIGURES, "verl", "ray"), ignore_unknown_options=True)
def compare(
    config: Annotated[Path, Argument(help="A recipe's YAML, e.g. recipes/quickstart/quickstart.yaml.")],
    overrides: Annotated[Names, Argument(help="Hydra overrides of all runs: trainer.total_training_steps=4.")] = None,
    precision: Annotated[Names, Option("--precision", "-p", help="Preset. Default: bf16 and fp16. Repeatable.")] = None,
    estimator: Annotated[Names, Option("--estimator", "-e", help="Preset, run in each precision. Repeatable.")] = None,
    arm: Annotated[Names, Option(help="Instead of -p and -e: an arm of the recipe, or `all`. Repeatable.")] = None,
    seed: Annotated[list[int] | None, Option(min=0, help="Run each arm with this seed. Repeatable.")] = None,
    parallel: Annotated[int, Option(min=1, help="Number of runs at a time. On a CPU each needs 8 GiB of memory.")] = 1,
    output: Annotated[Path, Option("--output", "-o", help="Results: FOLDER/<recipe>/<time>.")] = Path("outputs"),
    restart: Annotated[bool, Option("--restart", help="Start again, even if a comparison was interrupted.")] = False,
    once: Annotated[bool, Option("--once", help="If it has finished before, show it and start nothing.")] = False,
    pass_score: Annotated[float | None, Option(help="Report which runs end with a mean reward above N.")] = None,
    pass_steps: Annotated[int, Option(min=1, help="With --pass-score: average the reward over the last N steps.")] = 4,
) -> None:
    """Run one recipe in several precisions, estimators or seeds, and compare reward and mismatch.

    The command compares arms. An arm is a precision; with -e, an estimator in a precision; with --arm, an entry of the
    recipe's `arms: {clipped: [OVERRIDE, ...], ...}`. With --seed, for a recipe with the key `seed`, each arm runs once
    for each seed: -e grpo -e gspo --seed 1 --seed 2 makes eight runs, grpo-bf16/seed_1 to gspo-fp16/seed_2.

    Writes summary.json, comparison.png, report.html and, for each run, metrics.jsonl, train.log and checkpoints.
    Ctrl-C, SIGTERM and SIGHUP end every process of every run. The same command continues an interrupted comparison:
    finished runs are not repeated, and the others resume from their last checkpoints.
    """
    from verl_precision.tools.runs.compare.grid import check_arguments
    from verl_precision.tools.runs.compare.run import command_of, compare_runs, comparison_folder
    from verl_precision.tools.runs.compare.summary import PassBar

    bar = None if pass_score is None else PassBar(pass_score, pass_steps)
    precisions, chosen = precision or ([] if arm else ["bf16", "fp16"]), overrides or []
    runs = check_arguments(config, precisions, chosen, estimator or [], arm or [], seed or [])
    with comparison_folder(output / config.stem, command_of(config, runs, chosen), restart, once) as folder:
        if any(path.is_dir() for path in folder.iterdir()):  # the folder of a run
            say(f"This comparison has begun before; it continues in {folder}. To start again, add --restart.")
        with after_ctrl_c(f"every process of the run has ended; the same command continues in {folder}"):
            compare_runs(config, runs, chosen, folder, console, bar, parallel)


@verb("A run", needs=("jinja2",))
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Metrics (.jsonl), console log, or a folder.")],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="Page to write.")] = Path("report.html"),
    force: Annotated[bool, Option("--force", help="Replace a file that is not an earlier report.")] = False,
) -> None:
    """Write one HTML page about runs: reward, mismatch, clipping, loss scale, alarms. Several runs are overlaid.

    The page needs no network and no other file. For runs that still train, use verl-precision watch. If a run cannot be
    read, the page shows the others, and the exit code is 1.
    """
    from verl_precision.tools.runs.content import recorded_content
    from verl_precision.tools.runs.page import write_page
    from verl_precision.tools.runs.read import read_runs

    found = read_runs(runs)
    write_page(output, recorded_content(found), force)
    say(f"wrote {output}: open it in a browser")
    problems = [each.problem for each in found if each.problem]
    for problem in problems:
        say(problem, errors, "red")
    raise Exit(bool(problems))


@verb("A run")
def diagnose(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Metrics (.jsonl), console log, or a folder.")],
    in_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether runs are healthy: a word, the reason in numbers, and one action, in ten lines a run at most.

    The exit code is that of the worst run. 0: healthy. 1: watch, or too short to judge. 2: act now. 3: unreadable.
    """
    from verl_precision.tools.runs.content import Live, as_json

    views = [*Live(runs).views().values()]
    if in_json:
        found = [{key: each[key] for key in _DIAGNOSIS} for each in (view.content("") for view in views)]
        console.out(json.dumps(as_json(found)), highlight=False)
    for view in [] if in_json else views:
        verdict, page = view.verdict, f"the whole run: verl-precision report {shlex.quote(str(view.run.path))}"
        lines = [verdict.reason, f"next: {verdict.action}" if verdict.action else "", *view.problem.splitlines()[:2]]
        lines += [f"alarm {each.name} at step {each.step}, since step {each.since_step}" for each in view.alarms[-4:]]
        say("\n  ".join([f"{view.run.name}: {verdict.word}", *filter(None, lines), page]))
    raise Exit(max(view.verdict.exit_code if view.readable else 3 for view in views))


@verb("A run", needs=("jinja2", "starlette", "uvicorn"))
def watch(
    runs: Annotated[list[Path], Argument(metavar="FOLDER", help="Folder of one or more runs; a run may start later.")],
    once: Annotated[bool, Option("--once", help="Print a table of the runs' progress, and exit.")] = False,
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on. 0: any free port.")] = 8421,
) -> None:
    """Show runs on one local page while they train: reward, mismatch, alarms, time left, the tokens behind a number.

    The page reads the files of the runs and writes nothing. Runs may start, stop or resume while it is open. A click on
    a curve shows the tokens of that step, if the run keeps tokens (mismatch.keep_tokens=16).

    The address has a secret token and works only on this machine. From another machine, use the SSH command that is
    printed. Ctrl-C ends the page, not the runs. With --once the exit code is 0 unless a run cannot be read.
    """
    from verl_precision.tools.runs.content import Live

    live = Live(runs)
    if once:
        from verl_precision.tools.runs.status import status_table

        found = sorted(live.views().values(), key=lambda each: -each.verdict.exit_code)  # the sick first
        for each in found:
            say(f"{each.run.name}: {each.verdict}")
        names = [(each.run.name, each.status, [alarm.name for alarm in each.alarms]) for each in found]
        console.print(status_table(names))
        for each in found:
            for alarm in each.alarms:
                say(f"{each.run.name}: {alarm}")
            if each.problem:
                say(each.problem, errors)
        raise Exit(any(each.status.state == "unreadable" for each in found))
    from verl_precision.tools.runs.server import serve

    def say_where(address: str) -> None:
        taken = address.rsplit(":", 1)[1].partition("/")[0]
        say(f"open {address}")
        say(f"from another machine first: ssh -N -L {taken}:127.0.0.1:{taken} {socket.gethostname()}")

    try:
        serve(live, port, say_where)
    except KeyboardInterrupt:
        say("the page has ended; the runs continue")


@verb("Set-up")
def recipes(folder: Annotated[Path, Argument(help="Folder in which recipes/ is written.")] = Path()) -> None:
    """Write the package's recipes into FOLDER/recipes, to run and edit without a clone.

    It also writes cpu.lock and gpu.lock, which pin all packages in tested versions. Run the commands of the recipes'
    headers in FOLDER. An existing recipes/ is not changed.
    """
    target = folder / "recipes"
    if target.exists():
        problem, allowed = "this folder exists; nothing was written", "a folder without recipes/, or a new one"
        remedy = "Name another folder, or move the existing one away."
        raise ConfigurationError(problem, setting="FOLDER", value=str(target), allowed=allowed, remedy=remedy)
    with new_folder(target) as scratch:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(shipped_folder("recipes"), scratch, ignore=ignore, dirs_exist_ok=True)
        for lock in shipped_folder("requirements").glob("*.lock"):
            shutil.copy(lock, scratch)
    say(f"wrote {target}")
    start = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    if importlib.util.find_spec("verl") is None:
        say(f"next, on a CPU: {start}pip install --no-deps -r recipes/cpu.lock")
    say(f"next: {start}verl-precision compare recipes/quickstart/quickstart.yaml")
