"""Tables on a narrow console."""

import io

from rich.console import Console

from verl_precision.base.terminal import terminal_table

COLUMNS = ("step", "what is changed", "size (nats)", "part of |gap|", "share of k3")
ROW = ("weights", "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls", "1.2e-05", "3.4e-06", "97.3%")


def test_at_80_columns_words_fold_and_numbers_stand_in_one_piece():
    text = io.StringIO()
    Console(file=text, width=80).print(terminal_table(COLUMNS, [ROW], words=2))
    shown = text.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert all(number in shown.split() for number in ROW[2:])
    start = next(line.index("what is") for line in shown.splitlines() if "what is" in line)
    cells = [line[start:].split("  ")[0].strip() for line in shown.splitlines()]
    assert ROW[1] in "".join(cells)
