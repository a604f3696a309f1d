"""`verl-precision arithmetic`."""

import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from verl_precision.errors import ConfigurationError

console = Console()


def arithmetic(folder: Annotated[Path, typer.Argument(help="A folder to create.")]) -> None:
    """Write the sanity test's task for a CPU: sums, and a small model that is right on some of them, sometimes.

    The model is trained from scratch (under a minute on two cores) and cached. Writes FOLDER/problems.jsonl and
    FOLDER/model.
    """
    from verl_precision.arithmetic.model import KNOWN, cached_arithmetic_model
    from verl_precision.arithmetic.task import write_rows

    if folder.exists():
        raise ConfigurationError(f"{folder} exists; nothing was written. Name a folder that does not.")
    columns = (TextColumn("training on sums"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        model = cached_arithmetic_model(
            lambda step, known: bar.update(task, description=f"step {step}, knows {known:.0%} of {KNOWN:.0%}")
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".arithmetic-", dir=folder.parent) as scratch:  # the folder is complete or not there
        whole = Path(scratch) / "task"
        whole.mkdir()
        shutil.copytree(model, whole / "model")
        write_rows(whole / "problems.jsonl")
        whole.rename(folder)
    quoted = shlex.quote(str(folder))
    console.print(f"wrote {quoted}; next:", highlight=False)
    print(
        f"verl-precision sanity-set {quoted}/problems.jsonl --model {quoted}/model --output {quoted}/sanity "
        "--reward pkg://verl_precision.arithmetic.reward --max-prompt-length 8 --max-response-length 8"
    )
