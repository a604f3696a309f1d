"""Tables on a narrow console."""

import io

from rich.console import Console

from verl_precision.base.terminal import paragraph, printable, terminal_table

COLUMNS = ("step", "what is changed", "size (nats)", "part of |gap|", "share of k3")
ROW = ("weights", "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls", "1.2e-05", "3.4e-06", "97.3%")


def test_at_80_columns_words_fold_and_numbers_stand_in_one_piece():
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(COLUMNS, [ROW], words=2))
    shown = text.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert all(number in shown.split() for number in ROW[2:])
    start = next(line.index("what is") for line in shown.splitlines() if "what is" in line)
    assert ROW[1] in "".join(line[start:].split("  ")[0].strip() for line in shown.splitlines())


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
