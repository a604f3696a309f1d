"""Tables and paragraphs on a terminal, in one style for all verbs; long text is wrapped, not cut."""

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Control characters, characters that change the direction of a line, and lone surrogates, which no file can hold.
_UNSEEN = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a line that is safe on a terminal: invisible characters are written as \x1b."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class _Fitted(Table):
    """A table whose texts fold between words to fit its console; where that is not enough, a block for each row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths, least = list[int](), list[int]()
        for column in self.columns:
            sizes = [Text(str(each)).__rich_measure__(console, options) for each in (column.header, *column.cells)]
            widths.append(max(size.maximum for size in sizes))
            folded = max(min(20, widths[-1]), *(size.minimum for size in sizes))  # below 20 a text is hard to read
            least.append(widths[-1] if column.no_wrap else folded)
        room = options.max_width - 2 * len(widths)  # of padding
        while sum(widths) > room and (wide := [n for n, width in enumerate(widths) if width > least[n]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        if sum(widths) <= room:
            yield from super().__rich_console__(console, options)
            return
        yield Text(str(self.title or ""), "italic", end="\n" if self.title else "")
        headings = [str(column.header).replace("\n", " ") for column in self.columns]
        for row, *cells in zip(self.rows, *(map(str, column.cells) for column in self.columns), strict=True):
            words = [f"{name}: {cell}" if name else cell for name, cell in zip(headings, cells, strict=True) if cell]
            texts = [Text(each, str(row.style or ""), overflow="fold") for each in words]
            yield from texts[:1]
            yield Padding(Columns(texts[1:], padding=(0, 3)), (0, 0, 0, 2))


def terminal_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: int = 1,
    red: Collection[int] = (),
    title: str | None = None,
) -> Table:
    """Return a table for a console; on a narrow console each row is a block of `name: value`.

    The first `words` columns are text, aligned left, and fold between words. The other columns are numbers, aligned
    right, below a heading with one word on each line; they do not fold. Rows whose numbers are in `red` are red.
    """
    table = _Fitted(title=title, title_justify="left", box=None, header_style="bold")
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
