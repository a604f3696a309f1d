"""A comparison writes what it promises after each run, and shows how far the runs are."""

import io
import json
import os
import shutil
import threading

import pytest
from rich.console import Console

from verl_precision.base.errors import ConfigurationError, RunFailedError
from verl_precision.tools.runs import grid
from verl_precision.tools.runs.compare import outputs as comparison_files
from verl_precision.tools.runs.compare import run as compare
from verl_precision.tools.runs.compare.summary import PassBar
from verl_precision.tools.runs.launch import Progress

STARTED = "Ray has started"


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    """Compare recorded runs in place of real ones; return what the user sees. With `fails`, that one fails."""

    def compare_recorded(*precisions: str, fails: str = "", terminal: bool = False) -> str:
        def recorded(config, overrides, folder, on_progress, python, goes_on, threads):
            checkpoints = folder / "checkpoints"
            own = [f"precision={folder.name}", f"trainer.default_local_dir='{checkpoints}'"]
            assert config.name == "quickstart.yaml" and overrides == ["a=b", *own] and goes_on and threads is None
            assert checkpoints.is_dir()
            ran.append(folder.name)
            on_progress(Progress(STARTED, 0, None, 1.0))
            on_progress(Progress("training", 10, 10, 2.0))
            if folder.name == fails:
                raise RunFailedError("verl ended with exit code 1")
            shutil.copytree(root / "tests" / "data" / "quickstart" / folder.name, folder, dirs_exist_ok=True)
            return 60.0

        monkeypatch.setattr(compare, "run_verl", recorded)
        seen = io.StringIO()
        console = Console(file=seen, width=200, force_terminal=terminal)
        config = root / "recipes" / "quickstart" / "quickstart.yaml"
        runs = grid.with_seeds(grid.preset_arms(precisions))
        compare.compare_runs(config, runs, ["a=b"], tmp_path / "out", console, PassBar(-20, 4))
        return seen.getvalue()

    compare_recorded.ran = ran = []
    return compare_recorded


@pytest.mark.parametrize("terminal", [False, True])
def test_two_runs_are_compared(run, tmp_path, terminal):
    seen = run("bf16", "fp16", terminal=terminal)
    assert "ratio bf16/fp16" in seen and "bar -20" in seen and "report.html" in seen
    assert "verl-precision explain --run" in seen and "<precision>" in seen
    lines = [
        f"[    {second} s] {run}: {text}"
        for run in ("bf16", "fp16")
        for second, text in ((1, STARTED), (2, "step 10/10"))
    ]
    if terminal:
        assert "10/10" in seen and lines[0] not in seen
    else:
        assert seen.splitlines()[:4] == lines
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(run["precision"], run["steps"], run["seconds_total"]) for run in content["runs"]] == [
        ("bf16", 10, 60.0),
        ("fp16", 10, 60.0),
    ]
    assert content["ratios"]["bf16/fp16"]["k3_kl"] > 10 and content["pass_bar"].keys() == {"bf16", "fp16"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("bf16", "fp16", "summary.json", "comparison.png", "report.html")
    }


def test_what_was_measured_stays_when_a_later_run_fails_and_is_not_repeated(run, tmp_path):
    with pytest.raises(RunFailedError):
        run("bf16", "fp16", fails="fp16")
    (before,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert before["precision"] == "bf16"
    run.ran.clear()
    assert "ratio bf16/fp16" in run("bf16", "fp16")
    assert run.ran == ["fp16"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["runs"][0] == before


def test_runs_do_not_share_a_folder_of_checkpoints(root):
    recipe = root / "recipes" / "quickstart" / "quickstart.yaml"
    with pytest.raises(ConfigurationError, match="go on from each other's checkpoints"):
        compare.check_arguments(recipe, ["bf16", "fp16"], ["+trainer.default_local_dir=/data"])


@pytest.fixture
def run_grid(root, tmp_path, monkeypatch):
    """Compare recorded runs of a grid in place of real ones; `during(name, on_progress)` is called in each.

    The run `keeps` has what `during` wrote. Figure and report have one word: `run` has them drawn, test_figures.py too.
    """

    def compare_recorded(runs, during=lambda name, on_progress: None, side_by_side=1, keeps="") -> str:
        def recorded(config, overrides, folder, on_progress, python, goes_on, threads):
            name = folder.relative_to(tmp_path / "out").as_posix()
            ran.append((name, overrides[:-1]))
            assert overrides[-1] == f"trainer.default_local_dir='{folder / 'checkpoints'}'" and goes_on
            assert threads == (max(1, os.cpu_count() // side_by_side) if side_by_side > 1 else None)
            during(name, on_progress)
            on_progress(Progress("training", 10, 10, 2.0))
            if name != keeps:
                shutil.copytree(root / "tests" / "data" / "quickstart" / "fp16", folder, dirs_exist_ok=True)
            return 60.0

        monkeypatch.setattr(compare, "run_verl", recorded)
        monkeypatch.setattr(comparison_files, "write_comparison", lambda path, *drawn: path.write_text("figure"))
        monkeypatch.setattr(comparison_files, "page", lambda part, expected: "page")
        seen = io.StringIO()
        config = root / "recipes" / "quickstart" / "quickstart.yaml"
        console = Console(file=seen, width=200)
        compare.compare_runs(config, runs, ["a=b"], tmp_path / "out", console, side_by_side=side_by_side)
        return seen.getvalue()

    compare_recorded.ran = ran = []
    return compare_recorded


def recorded_summary(folder) -> list[tuple]:
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    return [tuple(run[key] for key in ("arm", "precision", "estimator", "seed")) for run in runs]


def test_estimators_times_precisions_times_seeds_each_in_its_folder(run_grid, tmp_path):
    runs = grid.with_seeds(grid.preset_arms(["bf16", "fp16"], ["grpo", "gspo"]), [1, 2])
    seen = run_grid(runs)
    assert run_grid.ran[0] == ("grpo-bf16/seed_1", ["a=b", "estimator=grpo", "precision=bf16", "seed=1"])
    assert [name for name, _ in run_grid.ran] == [run.name for run in runs] and len(runs) == 8
    assert recorded_summary(tmp_path / "out")[::3] == [
        ("grpo-bf16", "bf16", "grpo", 1),
        ("grpo-fp16", "fp16", "grpo", 2),
        ("gspo-fp16", "fp16", "gspo", 1),
    ]
    assert "gspo-fp16/seed_2: step 10/10" in seen and "<arm>/seed_<n>/metrics.jsonl" in seen
    assert "ratio grpo-bf16/grpo-fp16" in seen and "ratio grpo-bf16/gspo" not in seen
    assert (tmp_path / "out" / "comparison.png").exists() and not (tmp_path / "out" / "report_2.html").exists()
    run_grid.ran.clear()
    assert "ratio grpo-bf16/grpo-fp16" in run_grid(runs) and run_grid.ran == [], "finished runs are not repeated"


def test_runs_of_arms_side_by_side_are_at_the_same_time_and_listed_in_the_order_of_the_plan(run_grid, tmp_path):
    arms = [grid.Arm("clipped", ("precision=fp16", "x=1")), grid.Arm("shadow", ())]
    together, first_ended = threading.Barrier(2, timeout=60), threading.Event()

    def during(name, on_progress):
        together.wait()  # fails unless both are under way
        if name == "clipped":
            assert first_ended.wait(60)
        else:
            first_ended.set()

    seen = run_grid(grid.with_seeds(arms), during, side_by_side=2)
    assert recorded_summary(tmp_path / "out") == [("clipped", "fp16", None, None), ("shadow", None, None, None)]
    assert "clipped: step 10/10" in seen and "shadow: step 10/10" in seen and "<arm>/metrics.jsonl" in seen


def test_after_a_failure_what_is_under_way_goes_on_and_nothing_else_starts(run_grid, tmp_path):
    runs = grid.with_seeds([grid.Arm("mine", ())], [1, 2, 3, 4])
    together, failed = threading.Barrier(2, timeout=60), threading.Event()

    def during(name, on_progress):
        together.wait()
        if name == "mine/seed_1":
            failed.set()
            raise RunFailedError("verl ended with exit code 1")
        assert failed.wait(60)

    with pytest.raises(RunFailedError, match="exit code 1"):
        run_grid(runs, during, side_by_side=2)
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [2]
    run_grid.ran.clear()
    run_grid(runs)
    assert [name for name, _ in run_grid.ran] == ["mine/seed_1", "mine/seed_3", "mine/seed_4"]
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [1, 2, 3, 4]


def test_a_run_that_measured_no_mismatch_does_not_keep_another_from_being_recorded(run_grid, tmp_path):
    runs = grid.with_seeds([grid.Arm("mine", ())], [1, 2])
    ready = threading.Barrier(2, timeout=60)

    def during(name, on_progress):
        ready.wait()
        if name == "mine/seed_1":
            path = tmp_path / "out" / name / "metrics.jsonl"
            path.write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')

    with pytest.raises(ConfigurationError, match="the run did not report .*mismatch"):
        run_grid(runs, during, side_by_side=2, keeps="mine/seed_1")
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [2]


def test_ctrl_c_ends_every_run_under_way(run_grid, tmp_path, monkeypatch):
    runs = grid.with_seeds([grid.Arm("mine", ())], [1, 2, 3, 4])
    ended = []
    two_more = threading.Barrier(2, timeout=60)

    def during(name, on_progress):
        if name == "mine/seed_1":
            return
        two_more.wait()
        try:
            while True:  # as a real run does, which asks twice a second
                on_progress(Progress("training", 1, 10, 1.0))
        except KeyboardInterrupt:
            ended.append(name)
            raise

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison_files.Results, "draw", interrupt)  # the main thread is busy with the first run
    with pytest.raises(KeyboardInterrupt):
        run_grid(runs, during, side_by_side=2)
    assert sorted(ended) == ["mine/seed_2", "mine/seed_3"]
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [1], "the one that had finished"
