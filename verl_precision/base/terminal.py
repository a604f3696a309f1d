"""Tables and paragraphs on a terminal, in one style for all verbs; long text is wrapped, not cut."""

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Control characters, characters that change the direction of a line, and lone surrogates, which no file can hold.
_UNSEEN = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a line that is safe on a terminal: invisible characters are written as \x1b."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def terminal_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: int = 1,
    red: Collection[int] = (),
    framed: bool = False,
    title: str | None = None,
) -> Table:
    """Return a table for a console, with or without a frame.

    The first `words` columns are text, aligned left. The other columns are numbers, aligned right, below a heading with
    one word on each line; they do not fold on a narrow console. Rows whose numbers are in `red` are red.
    """
    table = Table(title=title, title_justify="left", box=HEAVY_HEAD if framed else None, header_style="bold")
    for number, column in enumerate(columns):
        heading, side = (column, "left") if number < words else (column.replace(" ", "\n"), "right")
        table.add_column(heading, justify=side, overflow="fold", no_wrap=number >= words)  # type: ignore[arg-type]
    for number, row in enumerate(rows):
        cells = [Text("\n".join(map(printable, cell.split("\n")))) for cell in row]
        table.add_row(*cells, style="red" if number in red else None)
    return table


def paragraph(text: str, console: Console, indent: str = "") -> str:
    """Return an indented text: wrapped between words on a terminal, unwrapped elsewhere (for grep)."""
    width = console.width if console.is_terminal else 10**9
    fold = textwrap.TextWrapper(
        width, indent, indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
    return "\n".join(fold.fill(printable(line)) for line in text.splitlines())
