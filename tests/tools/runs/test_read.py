"""Every source a run leaves gives the same numbers; what cannot be read is refused by name."""

import json
import math

import numpy
import pytest
from cases import cases

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.owner import release, take
from verl_precision.tools.runs.read import read_runs, sources_in

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


def test_verls_metrics_file_is_read_and_the_lock_of_its_folder_is_none(tmp_path):
    (run,) = read_runs([jsonl(tmp_path / "fp16" / "mine.jsonl")])
    assert run.rows == ROWS and run.name == "mine.jsonl" and run.notes == ()
    for folder in (tmp_path, tmp_path / "fp16"):
        assert take(folder) is None
        release(folder)
    (run,) = read_runs([tmp_path])
    assert run.rows == ROWS


def test_null_is_nan_words_are_left_out_and_a_step_logged_again_wins(tmp_path):
    rows = [*ROWS, {"step": 2, "mismatch/k3_kl": None, "model": "words"}]
    (run,) = read_runs([jsonl(tmp_path / "a.jsonl", rows)])
    assert len(run.rows) == 2 and run.rows[1]["critic/score/mean"] == -37.0
    assert math.isnan(run.rows[1]["mismatch/k3_kl"]) and "model" not in run.rows[1]
    assert run.notes == ("1 step(s) were logged more than once (by a resumed run); the last row of each counts",)


def test_console_log_with_ray_prefix_colour_noise_and_values_that_are_none(tmp_path):
    prefix = "\x1b[36m(TaskRunnerV1 pid=11694)\x1b[0m "
    text = "start\nstep: nothing\n" + "".join(console_line(row, prefix) + "noise - a:1\n" for row in ROWS)
    (tmp_path / "train.log").write_text(f"{text}step:3 - a:1.0 - b:0.2(TaskRunner) - c\n")
    (run,) = read_runs([tmp_path / "train.log"])
    assert run.rows == [*ROWS, {"step": 3, "a": 1.0}] and "2 value(s)" in run.notes[0]


def test_verls_own_console_line_is_read(tmp_path):
    """What verl's LocalLogger prints, numpy numbers, NaN and booleans included."""
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    data = {"a/x": numpy.float32(0.5), "b:c": numpy.int64(3), "nan": math.nan, "on": True, "off": False, "tiny": -1e-30}
    (tmp_path / "out.txt").write_text(concat_dict_to_str(data, step=7) + "\n")
    (run,) = read_runs([tmp_path / "out.txt"])
    (row,) = run.rows
    assert math.isnan(row.pop("nan")) and run.notes == ()
    assert row == {"step": 7, "a/x": 0.5, "b:c": 3.0, "on": 1.0, "off": 0.0, "tiny": -1e-30}


def test_a_folder_gives_its_file_and_a_folder_of_runs_each_run(tmp_path):
    for path in ("q/bf16", "q/fp16", "p/bf16"):
        jsonl(tmp_path / path / "metrics.jsonl")
    (tmp_path / "q" / "bf16" / "train.log").write_text(console_line(ROWS[0]))
    assert [run.name for run in read_runs([tmp_path / "q" / "bf16"])] == ["bf16"]
    jsonl(tmp_path / "p" / "bf16" / "other.jsonl")  # as verl names it: after the experiment, in its project's folder
    assert [run.name for run in read_runs([tmp_path / "p" / "bf16"])] == ["bf16", "other.jsonl"]
    assert [(run.name, run.rows) for run in read_runs([tmp_path / "q"])] == [("bf16", ROWS), ("fp16", ROWS)]
    two = [tmp_path / "p" / "bf16" / "metrics.jsonl", tmp_path / "q" / "bf16"]
    assert [run.name for run in read_runs(two)] == ["p/bf16", "q/bf16"]


def test_runs_are_found_at_any_depth_and_what_is_no_series_is_no_run(tmp_path):
    deep = [jsonl(tmp_path / "a" / "b" / "c" / "bf16" / "metrics.jsonl"), jsonl(tmp_path / "fp16" / "mine.jsonl")]
    for path, first in (("task/prompts.jsonl", {"prompt": "1+1"}), ("set/journal.jsonl", {"settings": {}})):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(json.dumps(first) + "\n")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert sources_in(tmp_path) == deep and sources_in(tmp_path / "task") == []
    (tmp_path / "task" / "metrics.jsonl").write_text('{"prompt": "1+1"}\n')
    (tmp_path / "set" / "broken.jsonl").write_text('{"step": 1, "da\n')
    assert [run.name for run in read_runs([tmp_path]) if run.problem] == ["broken.jsonl", "task"]


@pytest.mark.parametrize(("name", "words"), cases(__file__, "UNREADABLE"))
def test_what_cannot_be_read_is_refused(tmp_path, name, words):
    texts = {"broken.jsonl": '{"step":2,"da\n{"step":1,"data":{"a":1}}\n', "list.jsonl": "[]\n", "empty.jsonl": ""}
    for file, text in (texts | {"words.log": "no steps here\n"}).items():
        (tmp_path / file).write_text(text)
    (tmp_path / "none").mkdir()
    paths = [jsonl(tmp_path / "none" / "x.jsonl")] * 2 if name == "twice" else [tmp_path / name]
    with pytest.raises(ConfigurationError, match=words):
        read_runs(paths)


def test_a_row_that_is_cut_short_is_left_until_it_is_whole(tmp_path):
    path = jsonl(tmp_path / "metrics.jsonl")
    whole = path.read_bytes()
    for cut, rows in ((len(whole) - 9, 1), (len(whole) - 1, 2), (len(whole), 2)):
        path.write_bytes(whole[:cut])
        (run,) = read_runs([path])
        assert run.rows == ROWS[:rows]
        assert run.notes == (("the last row is incomplete and is left out",) if rows == 1 else ())
