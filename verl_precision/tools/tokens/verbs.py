"""The verb `tokens`: what the token dumps of another framework say about its run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from verl_precision.cli.verb import errors, say, verb


@verb("A run", needs=("torch", "jinja2"))
def tokens(
    dumps: Annotated[Path, Argument(metavar="FOLDER", help="Token dumps of one run.")],
    output: Annotated[Path, Option("--output", "-o", help="Results.")] = Path("outputs/tokens"),
    clip: Annotated[tuple[float, float] | None, Option(help="For phantom clipping: the loss's clip, 0.2 0.28.")] = None,
    allow_pickle: Annotated[bool, Option("--allow-pickle", help="Open .pt files that can run code.")] = False,
    force: Annotated[bool, Option("--force", help="Replace earlier results.")] = False,
) -> None:
    """Measure the mismatch from token dumps of prime-rl, NeMo-RL, slime, or of any loop in a plain format.

    Writes metrics.jsonl, which report and watch read, and report.html, and prints the alarms. Memory does not grow
    with the number of responses. Metrics of phantom clipping need a shadow's log-probs (plain format).
    """
    from rich.progress import DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from verl_precision.base.files import naming_file, require_regular, write_file
    from verl_precision.losses.settings import ClipRange, require_clip_range
    from verl_precision.tools.runs.content import RunView, recorded_content
    from verl_precision.tools.runs.page import write_page
    from verl_precision.tools.runs.read import read_runs
    from verl_precision.tools.tokens.formats import Response, dumps_in, rows_of

    metrics, page, bounds = output / "metrics.jsonl", output / "report.html", None
    for path in (metrics, page):
        require_regular(path, replace=force)
    if clip is not None:
        bounds = ClipRange.around_one(*require_clip_range(*clip))
    read, files = dumps_in(dumps)
    columns = TextColumn(f"{len(files)} files"), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("", total=sum(each.stat().st_size for each in files))

        def responses() -> Iterator[Response]:
            for path in files:
                with naming_file(path):
                    for size, response in read(path, allow_pickle):
                        progress.advance(task, size)
                        yield response

        rows = rows_of(responses(), bounds)
    if not rows:
        raise BadParameter(f"the dumps in {dumps} have no response")
    write_file(metrics, "".join(json.dumps(row) + "\n" for row in rows), replace=force)
    runs = read_runs([metrics])
    write_page(page, recorded_content(runs), force)
    view = RunView(runs[0], 0)
    for line in (*view.alarms, view.verdict):
        say(str(line))
    say(f"wrote {metrics} ({len(rows)} steps) and {page}: open it in a browser")
