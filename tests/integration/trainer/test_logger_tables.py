"""Tables reach W&B and TensorBoard, the libraries themselves, and neither can end a run."""

import re
from pathlib import Path
from types import SimpleNamespace

from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.utils.tracking import Tracking

from verl_precision.integration.trainer.logger_tables import TABLES, log_table
from verl_precision.mismatch.alarm import MismatchAlarm

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
STEP = 7
ROWS = [
    {"step": STEP, "alarm": "k3_growth", "value": float("inf"), "normal": "at most 3|4"},
    {"step": STEP, "alarm": "<script>alert(1)</script>", "value": 2.0, "normal": None},
]


def show(loggers):
    tracking = SimpleNamespace(logger=loggers)
    log_table(tracking, "alarm/raised", ROWS, STEP)
    log_table(tracking, "alarm/raised", [], STEP)


def test_wandb():
    import wandb

    logged = {}
    library = SimpleNamespace(Table=wandb.Table, log=lambda data, step: logged.update(data, step=step))
    show({"wandb": library, "console": None})
    table = logged["alarm/raised"]
    assert logged["step"] == STEP
    assert table.columns == list(ROWS[0]) and table.data == [list(row.values()) for row in ROWS]


def test_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    tracking = Tracking("project", "run", ["tensorboard"])
    show(tracking.logger)
    tracking.finish()
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    (event,) = events.Tensors("alarm/raised/text_summary")
    assert event.step == STEP
    html = plugin_util.markdown_to_safe_html(event.tensor_proto.string_val[0])
    cells = [" ".join(cell.split()) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", html)]
    script = "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert cells == [*ROWS[0], "7", "k3_growth", "inf", "at most 3|4", "7", script, "2.0", "None"]


def test_a_logger_that_fails_costs_a_line_and_not_the_run(caplog):
    """A library without this type; the next still gets its own."""
    shown = []
    writer = SimpleNamespace(add_text=lambda *_: shown.append(1))
    show({"wandb": SimpleNamespace(), "tensorboard": SimpleNamespace(writer=writer)})
    assert shown == [1] and [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "wandb could not show alarm/raised"
    ]


def test_an_alarm_is_a_row():
    (alarm,) = MismatchAlarm().update(3, {"precision/loss_scale": 1.0})
    row = alarm.row()
    assert (row["step"], row["alarm"], row["value"]) == (3, "loss_scale_at_minimum", 1.0)
    assert all(type(value) in (int, float, str) for value in row.values()) and row["try_first"]


def test_the_page_says_which_logger_shows_which():
    rows = re.findall(r"^\| `(\w+)` \| yes \| ([^|]+) \|$", PAGE, re.M)
    assert sorted(logger for logger, _ in rows) == sorted(Tracking.supported_backend), "every logger of verl, once"
    assert {logger for logger, table in rows if table != "no"} == TABLES.keys()
