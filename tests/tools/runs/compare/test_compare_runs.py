"""A comparison writes what it promises after each run, shows how far the runs are, and goes on in its folder."""

import io
import json
import os
import shutil
import threading

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from rubbish import FOREIGN

from verl_precision.base.errors import CheckpointStateError, RunFailedError
from verl_precision.tools.actions.rescue import Action, decide_rescue
from verl_precision.tools.runs.compare import grid
from verl_precision.tools.runs.compare import run as compare
from verl_precision.tools.runs.compare.run import COMMAND, SUMMARY, command_of, comparison_folder
from verl_precision.tools.runs.compare.summary import PassBar

STARTED = "Ray has started"
RECIPE = "recipes/quickstart/quickstart.yaml"
PRECISIONS = grid.with_seeds(grid.preset_arms(["bf16", "fp16"]))
SEEDS = grid.with_seeds({"mine": ()}, [1, 2, 3, 4])


@pytest.fixture
def run(root, tmp_path, monkeypatch):
    """Compare recorded runs in place of real ones; return what the user sees.

    `during(name, on_progress)` is called in each run.
    """

    def compare_recorded(runs, during=lambda name, on_progress: None, parallel=1, pass_bar=None) -> str:
        def recorded(config, overrides, folder, on_progress, goes_on, threads):
            name = folder.relative_to(tmp_path / "out").as_posix()
            ran.append((name, overrides[:-1]))
            checkpoints = folder / "checkpoints"
            assert config.name == "quickstart.yaml" and goes_on and checkpoints.is_dir()
            assert overrides[-1] == f"trainer.default_local_dir='{checkpoints}'"
            assert threads == (max(1, os.cpu_count() // parallel) if parallel > 1 else None)
            on_progress(STARTED, 1.0)
            during(name, on_progress)
            on_progress("step 10/10", 2.0)
            precision = folder.name if folder.name == "bf16" else "fp16"
            shutil.copytree(root / "tests" / "data" / "quickstart" / precision, folder, dirs_exist_ok=True)
            return 60.0

        monkeypatch.setattr(compare, "run_verl", recorded)
        seen = io.StringIO()
        console = Console(file=seen, width=200)
        compare.compare_runs(root / RECIPE, runs, ["a=b"], tmp_path / "out", console, pass_bar, parallel)
        return seen.getvalue()

    compare_recorded.ran = ran = []
    return compare_recorded


def recorded_summary(folder) -> list[tuple]:
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    return [tuple(run[key] for key in ("arm", "precision", "estimator", "seed")) for run in runs]


def test_two_runs_are_compared(run, tmp_path):
    seen = run(PRECISIONS, pass_bar=PassBar(-20, 4))
    assert run.ran == [(precision, ["a=b", f"precision={precision}"]) for precision in ("bf16", "fp16")]
    assert "ratio bf16/fp16" in seen and "bar -20" in seen and "report.html" in seen
    assert "verl-precision explain --run" in seen and "/<arm>" in seen
    texts = [f"[    {second} s] {{}}: {text}" for second, text in ((1, STARTED), (2, "step 10/10"))]
    assert seen.splitlines()[:4] == [text.format(precision) for precision in ("bf16", "fp16") for text in texts]
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = [(run["precision"], run["steps"], run["seconds_total"]) for run in content["runs"]]
    assert found == [("bf16", 10, 60.0), ("fp16", 10, 60.0)]
    assert content["ratios"]["bf16/fp16"]["k3_kl"] > 10 and content["pass_bar"].keys() == {"bf16", "fp16"}
    assert content["versions"]["verl"] and "k3 KL" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"bf16", "fp16", "summary.json", "comparison.png", "report.html"}


def test_a_run_that_was_rescued_is_called_so(run, root, tmp_path):
    def during(name, on_progress):
        if name == "bf16":
            on_progress("step 9/10", 1.5)
            folder = tmp_path / "out" / name / "checkpoints"
            trainer = {"default_local_dir": str(folder), "experiment_name": "bf16"}
            actor = {"actor": {"checkpoint": {"load_contents": ["model"]}}}
            config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": actor})
            decide_rescue(config, Action("low_effective_sample_size", 9, 1))
            on_progress("step 1/10", 1.6)

    seen = run(PRECISIONS, during)
    assert "bf16: rescued at step 9 to fp16; step 1/10" in seen and seen.count("bf16, rescued at step 9 to fp16") == 1
    words = [seen.rpartition("explain --run")[2].partition(f"\n{name}: ")[2][:9] for name in ("bf16", "fp16")]
    assert words == ["too short"] * 2, "at the end, a line for each run"
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [each["rescue"] for each in runs] == ["rescued at step 9 to fp16", ""]
    assert [each["verdict"]["word"] for each in runs] == ["too short to judge"] * 2


def test_estimators_times_precisions_times_seeds_each_in_its_folder(run, tmp_path):
    runs = grid.with_seeds(grid.preset_arms(["bf16", "fp16"], ["grpo", "gspo"]), [1, 2])
    seen = run(runs)
    assert run.ran[0] == ("grpo-bf16/seed_1", ["a=b", "estimator=grpo", "precision=bf16", "seed=1"])
    assert [name for name, _ in run.ran] == [run.name for run in runs] and len(runs) == 8
    expected = [("grpo-bf16", "bf16", "grpo", 1), ("grpo-fp16", "fp16", "grpo", 2), ("gspo-fp16", "fp16", "gspo", 1)]
    assert recorded_summary(tmp_path / "out")[::3] == expected
    assert "gspo-fp16/seed_2: step 10/10" in seen and "<arm>/seed_<n>" in seen
    assert "ratio grpo-bf16/grpo-fp16" in seen and "ratio grpo-bf16/gspo" not in seen


def test_runs_of_arms_side_by_side_are_at_the_same_time_and_listed_in_the_order_of_the_plan(run, tmp_path):
    arms = {"clipped": ("precision=fp16", "x=1"), "shadow": ()}
    together, first_ended = threading.Barrier(2, timeout=60), threading.Event()

    def during(name, on_progress):
        together.wait()  # fails unless both are under way
        assert name == "shadow" or first_ended.wait(60)
        first_ended.set()

    seen = run(grid.with_seeds(arms), during, parallel=2)
    assert recorded_summary(tmp_path / "out") == [("clipped", "fp16", None, None), ("shadow", None, None, None)]
    assert "clipped: step 10/10" in seen and "shadow: step 10/10" in seen and "/<arm>" in seen


def test_after_a_failure_what_is_under_way_goes_on_and_nothing_else_starts(run, tmp_path):
    together, failed = threading.Barrier(2, timeout=60), threading.Event()

    def during(name, on_progress):
        together.wait()
        if name == "mine/seed_1":
            failed.set()
            raise RunFailedError("verl ended with exit code 1")
        assert failed.wait(60)

    with pytest.raises(RunFailedError, match="exit code 1"):
        run(SEEDS, during, parallel=2)
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [2]
    run.ran.clear()
    run(SEEDS)
    assert [name for name, _ in run.ran] == ["mine/seed_1", "mine/seed_3", "mine/seed_4"], "2 is not repeated"
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [1, 2, 3, 4]


def test_ctrl_c_ends_every_run_under_way(run, tmp_path, monkeypatch):
    ended, two_more = [], threading.Barrier(3, timeout=60)

    def during(name, on_progress):
        if name == "mine/seed_1":
            return
        two_more.wait()
        try:
            while True:  # as a real run does, which asks twice a second
                on_progress("step 1/10", 1.0)
        except KeyboardInterrupt:
            ended.append(name)
            raise

    def interrupt(runs):
        two_more.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "recorded_content", interrupt)  # the main thread is busy with the first run
    with pytest.raises(KeyboardInterrupt):
        run(SEEDS, during, parallel=2)
    assert sorted(ended) == ["mine/seed_2", "mine/seed_3"]
    assert [seed for *_, seed in recorded_summary(tmp_path / "out")] == [1], "the one that had finished"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "recipes" / "mine" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("a: 1")
    return path


@pytest.fixture
def command(mine):
    return lambda *overrides: command_of(mine, PRECISIONS, overrides)


def finish(folder, *arms, seed=None):
    runs = [{"arm": arm, "seed": seed, "seconds_total": 1.0} for arm in arms]
    (folder / SUMMARY).write_text(json.dumps({"runs": runs}))


@pytest.fixture
def interrupted(tmp_path, command):
    """A comparison of which one run has finished."""
    with comparison_folder(tmp_path / "out", command()) as folder:
        finish(folder, "bf16")
    return folder.rename(folder.with_name("2026-01-01_00-00-00"))


def test_an_interrupted_comparison_goes_on_until_it_is_finished(tmp_path, command, interrupted):
    for _ in range(2):
        with comparison_folder(tmp_path / "out", command()) as folder:
            assert folder == interrupted
    finish(interrupted, "bf16", "fp16")
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder != interrupted
        finish(folder, "bf16", "fp16")
    with comparison_folder(tmp_path / "out", command(), once=True) as again:
        assert again == folder


@pytest.mark.parametrize(("runs", "more", "anew", "text"), [
    (PRECISIONS, ["a=b"], False, "a: 1"), (PRECISIONS, [], True, "a: 1"), (PRECISIONS, [], False, "a: 2"),
    *((runs, [], False, "a: 1") for runs in (PRECISIONS[:1], grid.with_seeds(grid.preset_arms(["bf16", "fp16"]), [1]))),
])  # fmt: skip
def test_another_plan_command_or_recipe_and_anew_get_a_new_folder(tmp_path, mine, interrupted, runs, more, anew, text):
    mine.write_text(text)
    with comparison_folder(tmp_path / "out", command_of(mine, runs, more), anew=anew) as folder:
        assert folder != interrupted


@pytest.mark.parametrize("content", [*FOREIGN.values()][::4], ids=[*FOREIGN][::4])
def test_a_damaged_comparison_ends_no_other_and_its_runs_are_not_made_again_unasked(
    tmp_path, command, interrupted, content
):
    neighbour = interrupted.with_name("2026-01-02_00-00-00")
    neighbour.mkdir()
    (neighbour / COMMAND).write_bytes(content)
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder == interrupted
    (interrupted / SUMMARY).write_bytes(content)
    with pytest.raises(CheckpointStateError, match=SUMMARY), comparison_folder(tmp_path / "out", command()):
        pass
    with comparison_folder(tmp_path / "out", command(), anew=True) as folder:
        assert folder not in (interrupted, neighbour)


def test_one_that_is_running_is_left_alone(tmp_path, command, interrupted):
    with comparison_folder(tmp_path / "out", command()) as first:
        with comparison_folder(tmp_path / "out", command()) as second:
            assert first == interrupted and second != interrupted
