"""Histograms and tables reach W&B and TensorBoard, the libraries themselves, and neither can end a run."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.utils.tracking import Tracking

from verl_precision.integration.trainer.logger_tables import HISTOGRAMS, MOST_BINS, TABLES, log_histograms, log_table
from verl_precision.mismatch.alarm import MismatchAlarm
from verl_precision.mismatch.token_sums import gap_counts, gap_edges

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
NAME, STEP = "mismatch/log_prob_gap", 7
# Over so many octaves that there are more bins than wandb takes; 40 gaps lie beyond the grid.
GAPS = torch.cat([torch.logspace(-8, 3, 1000), -torch.logspace(-8, 3, 500), torch.full((40,), 1e4)])
ROWS = [
    {"step": STEP, "alarm": "k3_growth", "value": float("inf"), "normal": "at most 3|4"},
    {"step": STEP, "alarm": "<script>alert(1)</script>", "value": 2.0, "normal": None},
]


def show(loggers):
    tracking = SimpleNamespace(logger=loggers)
    log_histograms(tracking, {NAME: (gap_edges(), gap_counts(GAPS)), "empty": (np.arange(3.0), np.zeros(2))}, STEP)
    log_table(tracking, "alarm/raised", ROWS, STEP)
    log_table(tracking, "alarm/raised", [], STEP)


def are_the_gaps(counts, edges):
    """Every gap is in the bin that holds it."""
    expected = np.histogram(GAPS.double(), [*edges[:-1], np.inf])[0]
    return len(edges) == len(counts) + 1 <= MOST_BINS + 1 and np.array_equal(counts, expected)


def test_wandb():
    import wandb

    logged = {}
    library = SimpleNamespace(
        Histogram=wandb.Histogram, Table=wandb.Table, log=lambda data, step: logged.update(data, step=step)
    )
    show({"wandb": library, "console": None})
    histogram, table = logged[NAME], logged["alarm/raised"]
    assert logged["step"] == STEP and are_the_gaps(histogram.histogram, histogram.bins)
    assert table.columns == list(ROWS[0]) and table.data == [list(row.values()) for row in ROWS]


def test_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    tracking = Tracking("project", "run", ["tensorboard"])
    show(tracking.logger)
    tracking.finish()
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0, "tensors": 0}).Reload()
    (event,) = events.Histograms(NAME)
    assert event.step == STEP and event.histogram_value.num == len(GAPS)
    assert are_the_gaps(event.histogram_value.bucket, [event.histogram_value.min, *event.histogram_value.bucket_limit])
    (event,) = events.Tensors("alarm/raised/text_summary")
    html = plugin_util.markdown_to_safe_html(event.tensor_proto.string_val[0])
    cells = [" ".join(cell.split()) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", html)]
    script = "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert cells == [*ROWS[0], "7", "k3_growth", "inf", "at most 3|4", "7", script, "2.0", "None"]


def test_a_logger_that_fails_costs_a_line_and_not_the_run(caplog):
    """A library without these types; the next still gets its own."""
    writer = SimpleNamespace(add_histogram_raw=lambda *_, **__: shown.append(1), add_text=lambda *_: shown.append(2))
    shown = []
    show({"wandb": SimpleNamespace(), "tensorboard": SimpleNamespace(writer=writer)})
    assert shown == [1, 2]
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [f"wandb could not log {name}" for name in (NAME, "alarm/raised")]


def test_an_alarm_is_a_row():
    (alarm,) = MismatchAlarm().update(3, {"precision/loss_scale": 1.0})
    row = alarm.row()
    assert (row["step"], row["alarm"], row["value"]) == (3, "loss_scale_at_minimum", 1.0)
    assert all(type(value) in (int, float, str) for value in row.values()) and row["try_first"]


def test_the_page_says_which_logger_shows_which():
    rows = re.findall(r"^\| `(\w+)` \| (yes) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
    assert sorted(logger for logger, *_ in rows) == sorted(Tracking.supported_backend), "every logger of verl, once"
    assert {logger for logger, _, histogram, _ in rows if histogram != "no"} == HISTOGRAMS.keys()
    assert {logger for logger, _, _, table in rows if table != "no"} == TABLES.keys()
