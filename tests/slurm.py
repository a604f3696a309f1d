#!/usr/bin/env python
"""A Slurm of one machine for tests: `sbatch`, `srun` and `scontrol`, as far as recipes/launch/slurm.sbatch uses them.

A node is this machine under another name. A job whose batch shell is killed has lost its node; it starts again with
--requeue, under the same id, as after `scontrol requeue`. At the time limit every process of the job is killed. The
batch shell's process id is in the file `BATCH`. Like the real one, `srun` makes SIGKILL of a SIGTERM that it gets
itself, and hands SIGUSR1 and SIGUSR2 on (Slurm's src/srun/libsrun/srun_job.c, `_srun_signal_mgr`).
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

STATE = "STAND_IN_SLURM"  # variable: the folder that `install` was given; every process of the job carries it
JOB = "STAND_IN_SLURM_JOB"  # variable: the id of the one job
BATCH = "batch.pid"  # in that folder


def install(folder: Path, job: str = "12345", *programs: Path) -> dict[str, str]:
    """Put the commands into an empty folder; return variables for the environment of whoever calls `sbatch`.

    `job` is the id that the job gets, and `programs` are more folders for PATH.
    """
    for name in ("sbatch", "srun", "scontrol"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        command.chmod(0o755)
    path = ":".join([str(folder), *map(str, programs), os.environ["PATH"]])
    return {"PATH": path, STATE: str(folder), JOB: job}


def _in_job(process: psutil.Process, folder: Path) -> bool:
    variables = process.info["environ"] or {}  # None: another user's
    return variables.get(STATE) == str(folder) and "SLURM_JOB_ID" in variables


def kill_job(folder: Path) -> None:
    """Kill every process of the job, which are those that `sbatch` started."""
    while processes := [process for process in psutil.process_iter(["environ"]) if _in_job(process, folder)]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                process.kill()
        time.sleep(0.05)


def warn_job(folder: Path) -> None:
    """Signal the batch shell as Slurm does before the time limit."""
    os.kill(int((folder / BATCH).read_text()), signal.SIGUSR1)


def end_step(folder: Path, program: str) -> None:
    """Send SIGTERM to the task of the step that runs a program, as `scancel --signal=TERM JOB.STEP` does."""
    for process in psutil.process_iter(["environ", "cmdline"]):
        if _in_job(process, folder) and program in (process.info["cmdline"] or ()):
            process.terminate()


def sbatch(arguments: list[str]) -> int:
    """Run a job to its end, through all its starts; return its exit code."""
    ours = [argument for argument in arguments if argument.startswith("--")]
    script, *rest = arguments[len(ours) :]
    options = {"--nodes": "1", "--output": "slurm-%j.log"}
    for option in (*re.findall(r"^#SBATCH (--\S+)", Path(script).read_text().split("\nset -")[0], re.M), *ours):
        name, _, value = option.partition("=")
        options[name] = value
    folder = Path(os.environ[STATE])
    environment = {
        **os.environ,
        **{"SLURM_JOB_ID": os.environ[JOB], "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_GPUS_ON_NODE": "1"},
        "SLURM_JOB_NODELIST": ",".join(f"node{i}" for i in range(int(options["--nodes"]))),
    }
    limit = sum(unit * int(part) for unit, part in zip((3600, 60, 1), options["--time"].split(":"), strict=True))
    warning = limit - int(re.fullmatch(r"B:USR1@(\d+)", options["--signal"])[1])
    for restart in range(100):
        if restart:
            environment["SLURM_RESTART_COUNT"] = str(restart)
        mode = "ab" if options["--open-mode"] == "append" else "wb"
        with open(options["--output"].replace("%j", os.environ[JOB]), mode) as log:  # like slurmd, it makes no folder
            job = subprocess.Popen(["bash", script, *rest], stdout=log, stderr=log, env=environment)
        (folder / BATCH).write_text(str(job.pid))
        asked, timed_out = folder / "requeue", _wait(job, warning, limit)
        kill_job(folder)
        if not asked.exists() and (timed_out or job.returncode != -signal.SIGKILL or "--requeue" not in options):
            return 1 if timed_out else job.returncode
        asked.unlink(missing_ok=True)
    raise RuntimeError("the job was queued again without an end")


def _wait(job: subprocess.Popen, warning: float, limit: float) -> bool:
    """Wait for the batch shell, signal it before the limit; return whether it was still running there."""
    try:
        job.wait(warning)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(limit - warning)
    return job.returncode is None


def srun(arguments: list[str]) -> int:
    """Run the command behind the options, with the variables that --export asks for; treat signals as srun does."""
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        if name == "--export":
            os.environ.update(pair.split("=", 1) for pair in value.split(",")[1:])
        if name == "--nodelist":
            os.environ["SLURMD_NODENAME"] = value
    task = subprocess.Popen(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: task.kill())
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: task.send_signal(number))
    code = task.wait()
    return code if code >= 0 else 128 - code


def scontrol(arguments: list[str]) -> int:
    """Show host names, or note that the job is to be queued again."""
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2].replace(",", "\n"))
    elif arguments == ["requeue", os.environ[JOB]]:
        (Path(os.environ[STATE]) / "requeue").touch()
    else:
        raise SystemExit(f"unknown: {arguments}")
    return 0


if __name__ == "__main__":
    raise SystemExit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
