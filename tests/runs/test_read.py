"""Every source a run leaves gives the same numbers; what cannot be read is refused by name."""

import importlib.util
import json
import math

import pytest

from verl_precision.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.runs.read import read_runs

ROWS = [
    {"step": 1, "critic/score/mean": -42.5, "actor/precision/loss_scale": 65536.0, "mismatch/k3_kl": 1.25e-8},
    {"step": 2, "critic/score/mean": -37.0, "actor/precision/loss_scale": 32768.0, "mismatch/k3_kl": 0.0},
]


def jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"step": row["step"], "data": {k: v for k, v in row.items() if k != "step"}} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def console_line(row, prefix=""):
    pairs = [f"{key}:{value!r}" for key, value in row.items() if key != "step"]
    return f"{prefix}step:{row['step']} - " + " - ".join(pairs) + "\n"


def test_file_logger(tmp_path):
    (run,) = read_runs([jsonl(tmp_path / "mine.jsonl")])
    assert run.rows == ROWS and run.name == "mine.jsonl" and run.notes == ()


def test_console_log_with_ray_prefix_colour_and_noise(tmp_path):
    prefix = "\x1b[36m(TaskRunnerV1 pid=11694)\x1b[0m "
    text = "start\nstep: nothing\n" + "".join(console_line(row, prefix) + "noise - a:1\n" for row in ROWS)
    (tmp_path / "train.log").write_text(text)
    (run,) = read_runs([tmp_path / "train.log"])
    assert run.rows == ROWS and run.notes == ()


def test_verls_own_console_line_is_read(tmp_path):
    """What verl's LocalLogger prints, numpy numbers, NaN and booleans included."""
    import numpy
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    data = {"a/x": numpy.float32(0.25), "b:c": numpy.int64(3), "nan": float("nan"), "flag": True, "tiny": -1.5e-30}
    (tmp_path / "out.txt").write_text(concat_dict_to_str(data, step=7) + "\n")
    (run,) = read_runs([tmp_path / "out.txt"])
    (row,) = run.rows
    assert math.isnan(row.pop("nan")) and run.notes == ()
    assert row == {"step": 7, "a/x": 0.25, "b:c": 3.0, "flag": 1.0, "tiny": -1.5e-30}


def test_unreadable_values_of_a_log_are_counted(tmp_path):
    (tmp_path / "train.log").write_text("step:1 - a:1.0 - b:0.2(TaskRunner) - c\n")
    (run,) = read_runs([tmp_path / "train.log"])
    assert run.rows == [{"step": 1, "a": 1.0}] and "2 value(s)" in run.notes[0]


def test_tensorboard_events(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for row in ROWS:
            for key, value in row.items():
                if key != "step":
                    writer.add_scalar(key, value, row["step"])
    (run,) = read_runs([tmp_path / "tb"])
    assert [row["step"] for row in run.rows] == [1, 2] and run.name == "tb"
    assert [row["mismatch/k3_kl"] for row in run.rows] == pytest.approx([1.25e-8, 0.0])
    (single,) = read_runs([next((tmp_path / "tb").iterdir())])
    assert single.rows == run.rows


def test_tensorboard_that_is_not_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentMismatchError, match="pip install tensorboard"):
        read_runs([tmp_path])


def test_a_folder_gives_its_file_and_a_folder_of_runs_each_run(tmp_path):
    jsonl(tmp_path / "q" / "bf16" / "metrics.jsonl")
    jsonl(tmp_path / "q" / "fp16" / "metrics.jsonl")
    (tmp_path / "q" / "bf16" / "train.log").write_text(console_line(ROWS[0]))
    assert [run.name for run in read_runs([tmp_path / "q" / "bf16"])] == ["bf16"]
    runs = read_runs([tmp_path / "q"])
    assert [run.name for run in runs] == ["bf16", "fp16"] and all(run.rows == ROWS for run in runs)
    jsonl(tmp_path / "p" / "bf16" / "metrics.jsonl")
    names = [run.name for run in read_runs([tmp_path / "p" / "bf16", tmp_path / "q" / "bf16"])]
    assert names == ["p/bf16", "q/bf16"]


def test_null_is_nan_words_are_left_out_and_a_step_logged_again_wins(tmp_path):
    rows = [*ROWS, {"step": 2, "mismatch/k3_kl": None, "model": "words"}]
    (run,) = read_runs([jsonl(tmp_path / "a.jsonl", rows)])
    assert len(run.rows) == 2 and run.rows[1]["critic/score/mean"] == -37.0
    assert math.isnan(run.rows[1]["mismatch/k3_kl"]) and "model" not in run.rows[1]
    assert run.notes == ("1 step(s) were logged more than once (a resumed run): the last counts",)


def test_what_cannot_be_read_is_refused(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"step":1,"data":{"a":1}}\n{"step":2,"da')
    empty, log = tmp_path / "empty.jsonl", tmp_path / "words.log"
    empty.write_text(""), log.write_text("no steps here\n")
    (tmp_path / "none").mkdir()
    for path, words in (
        (tmp_path / "nowhere", "nowhere: no such file or folder"),
        (broken, "not a metrics file"),
        (empty, "no training step"),
        (log, "no training step"),
        (tmp_path / "none", "no metrics in it"),
        (tmp_path, "several files could be meant: broken.jsonl, empty.jsonl"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            read_runs([path])
    with pytest.raises(ConfigurationError, match="given twice"):
        read_runs([jsonl(tmp_path / "x.jsonl")] * 2)
