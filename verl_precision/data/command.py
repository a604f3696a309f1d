"""`verl-precision data`."""

from pathlib import Path
from typing import Annotated

import typer


def data(
    name: Annotated[str, typer.Argument(help="The data set; an unknown name lists them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder; the file is NAME.parquet.")] = Path("data"),
    template: Annotated[
        str | None, typer.Option(help="Prompt of a family of models; an unknown one lists them.")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="A .parquet or .jsonl of it here, instead of a download.")] = None,
    stand_in: Annotated[bool, typer.Option("--stand-in", help="A few sums in its columns; no network.")] = False,
    any_count: Annotated[bool, typer.Option("--any-count", help="Write it with another number of problems.")] = False,
) -> None:
    """Write one of the paper's data sets in verl's format; its columns and its size are checked."""
    from verl_precision.data.prepare import prepare

    print(prepare(name, output / f"{name}.parquet", template, source, stand_in, any_count))
