"""Tables on a narrow console."""

import io
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from verl_precision.base.terminal import paragraph, printable, terminal_table

ROW = ("weights", "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls")
WORD = st.text("abc_/.é", min_size=1, max_size=12) | st.text("run_/0", min_size=20, max_size=50)
TEXT = st.lists(WORD, min_size=1, max_size=6).map(" ".join)
NUMBER = st.floats().map(lambda value: f"{value:.3g}") | st.just("")


@st.composite
def tables(draw):
    """Columns, rows, and how many columns are text."""
    texts, numbers = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    columns = [draw(TEXT) for _ in range(texts)] + [f"part of k{n}" for n in range(numbers)]
    row = st.tuples(*[TEXT] * texts, *[NUMBER] * numbers)
    return columns, draw(st.lists(row, min_size=1, max_size=4)), texts


@given(table=tables(), width=st.integers(60, 120), title=st.none() | TEXT)
def test_on_a_console_of_any_width_no_word_and_no_number_is_broken(table, width, title):
    (columns, rows, words), text = table, io.StringIO()
    Console(file=text, width=width).print(terminal_table(columns, rows, words, title=title))
    lines = text.getvalue().splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert not Counter(word for row in rows for cell in row for word in cell.split()) - Counter(text.getvalue().split())


def test_lines_end_between_words_on_a_terminal_alone():
    text = f"set {ROW[1]} to its default"
    on = Console(file=io.StringIO(), width=30, force_terminal=True)
    assert paragraph(text, on, "  ").splitlines() == ["  set", f"  {ROW[1]}", "  to its default"]
    assert paragraph(text, Console(file=io.StringIO(), width=30), "  ") == f"  {text}"


def test_what_a_terminal_would_obey_is_written_out():
    obeyed = "\x1b[31m\x07\x9b\r\x00\u202e\u2066"
    console = Console(file=io.StringIO(), width=200)
    console.print(terminal_table(("run",), [(f"run{obeyed}\ud800",)]))
    said = paragraph(f"one{obeyed}\ntwo\tthree é \U0001f469\u200d\U0001f52c", console)
    assert not {*obeyed} - {*"[31m"} & {*console.file.getvalue(), *said} and "\\x1b[31m" in console.file.getvalue()
    assert said.splitlines()[-1] == "two three é \U0001f469\u200d\U0001f52c" and printable("a\nb") == "a\\nb"
