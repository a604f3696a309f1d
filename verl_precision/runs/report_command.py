"""`verl-precision report`."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_precision.errors import EnvironmentMismatchError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A metrics file (.jsonl), a console log, TensorBoard events, or a folder with one of them.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is not an earlier report.")] = False,
) -> None:
    """Write one HTML page about runs: reward, mismatch, clipping, loss scale, alarms; several runs are overlaid.

    The page needs no network and no other file.
    """
    if absent := [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]:
        raise EnvironmentMismatchError(
            f"the report needs {' and '.join(absent)}, not installed", remedy="pip install jinja2 'matplotlib>=3.8'"
        )
    from verl_precision.runs.page import page, write_page
    from verl_precision.runs.read import read_runs

    write_page(output, page(read_runs(runs)), force)
    Console().print(f"wrote {output}: open it in a browser", soft_wrap=True)
