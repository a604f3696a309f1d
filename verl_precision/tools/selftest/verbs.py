"""The verb `selftest`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from verl_precision.base.errors import after_ctrl_c
from verl_precision.cli.verb import console, say, verb


@verb("Before a run")
def selftest(
    only: Annotated[
        list[str] | None,
        Option(help="Name of a check, e.g. flipped_bit; an unknown name prints all. Repeat the option for several."),
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the results.")] = None,
) -> None:
    """Test whether this machine is fit for FP16 RL: short runs of verl, vLLM and Ray, overflows, planted faults.

    One GPU is enough. On a CPU, checks that need a GPU are not run. Writes selftest.json and the log of each check. The
    exit code is 1 if a check failed.
    """
    import torch

    from verl_precision.tools.selftest.session import run_selftest

    folder = output or Path("outputs") / "selftest" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with after_ctrl_c(f"every process has ended. Results until then: {folder}"):
        outcomes = run_selftest(folder, "cuda" if torch.cuda.is_available() else "cpu", only or [], console)
    failed = any(outcome.status == "failed" for outcome in outcomes)
    then = "read the log of the failed check" if failed else "verl-precision check -- COMMAND"
    say(f"results: {folder}\nnext: {then}")
    raise Exit(failed)
