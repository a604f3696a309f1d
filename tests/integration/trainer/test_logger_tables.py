"""Histograms and tables reach every logger of verl that shows them, and none of these can end a run.

wandb and TensorBoard are the libraries themselves. MLflow, SwanLab and trackio are stand-ins with the names and
arguments of mlflow 3.17, swanlab 0.10 and trackio 0.43, each of which was tried with verl's `Tracking`, offline.
"""

import json
import re
import sys
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


class Standing:
    """A library, or verl's adapter for it, that remembers what it is given."""

    def __init__(self, **members):
        self.logged = []
        self.__dict__.update(members)

    def log(self, data, step):
        assert step == STEP
        ((name, shown),) = data.items()
        self.logged.append((name, shown))


class Bar:
    def add_xaxis(self, labels):
        self.labels = labels
        return self

    def add_yaxis(self, name, values):
        self.values = values
        return self


class Table:
    def add(self, headers, rows):
        self.headers, self.rows = headers, rows
        return self


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

    library = Standing(Histogram=wandb.Histogram, Table=wandb.Table)
    show({"wandb": library, "console": None})
    (name, histogram), (table_name, table) = library.logged
    assert name == NAME and are_the_gaps(histogram.histogram, histogram.bins)
    assert table_name == "alarm/raised" and table.columns == list(ROWS[0])
    assert table.data == [list(row.values()) for row in ROWS]


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
    assert cells == [
        *ROWS[0],
        "7",
        "k3_growth",
        "inf",
        "at most 3|4",
        "7",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "2.0",
        "None",
    ]


def test_mlflow(monkeypatch):
    artifacts = {}
    library = SimpleNamespace(log_text=lambda text, artifact_file: artifacts.update({artifact_file: json.loads(text)}))
    monkeypatch.setitem(sys.modules, "mlflow", library)
    show({"mlflow": object()})
    histogram, table = artifacts[f"{NAME}/step_7.json"], artifacts["alarm/raised/step_7.json"]
    low, high, counts = zip(*histogram["data"], strict=True)
    assert histogram["columns"] == ["from", "to", "count"] and all(counts), "bins of nothing are left out"
    assert are_the_gaps(counts, [*low, high[-1]])
    assert table == {"columns": list(ROWS[0]), "data": [list(row.values()) for row in ROWS]}


def test_swanlab():
    library = Standing(echarts=SimpleNamespace(Bar=Bar, Table=Table))
    show({"swanlab": library})
    (name, bars), (_, table) = library.logged
    assert name == NAME and len(bars.labels) == len(bars.values) <= MOST_BINS and sum(bars.values) == len(GAPS)
    assert (table.headers, table.rows) == (list(ROWS[0]), [list(row.values()) for row in ROWS])


def test_trackio():
    library = Standing(
        Histogram=lambda np_histogram: np_histogram,
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )
    show({"trackio": SimpleNamespace(trackio=library)})
    (_, histogram), (_, table) = library.logged
    assert are_the_gaps(*histogram) and table == ROWS


def test_a_logger_that_fails_costs_a_line_and_not_the_run(caplog):
    """A library without these types, and one whose server is gone; the next still gets its own."""
    from wandb import Histogram

    def gone(*_, **__):
        raise ConnectionError("no server")

    healthy = Standing(Histogram=Histogram)
    show({"swanlab": Standing(), "trackio": SimpleNamespace(trackio=Standing(log=gone)), "wandb": healthy})
    assert [name for name, _ in healthy.logged] == [NAME]
    said = sorted(record.getMessage().partition(":")[0] for record in caplog.records)
    assert said == sorted(
        [f"{each} could not show {name}" for each in ("swanlab", "trackio") for name in (NAME, "alarm/raised")]
        + ["wandb could not show alarm/raised"]
    )


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
