"""Tables on a terminal, of the same look for all verbs, which fold what is too long and cut nothing."""

from collections.abc import Collection, Iterable, Sequence

from rich.box import HEAVY_HEAD
from rich.table import Table


def terminal_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: int = 1,
    red: Collection[int] = (),
    framed: bool = False,
    title: str | None = None,
) -> Table:
    """Return a table for a console, with or without a frame.

    The first columns, as many as `words`, stand at the left; the others are numbers, at the right, below a heading of
    one word a line. On a narrow console the widest columns fold. Rows with the numbers `red` are red.
    """
    box = HEAVY_HEAD if framed else None
    table = Table(title=title, title_justify="left", box=box, header_style="bold")
    for number, column in enumerate(columns):
        heading, side = (column, "left") if number < words else (column.replace(" ", "\n"), "right")
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    for number, row in enumerate(rows):
        table.add_row(*row, style="red" if number in red else None)
    return table
