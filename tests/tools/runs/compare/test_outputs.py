"""Which folder a comparison has, and where it shows each run: in which plot, beside which curves, in which report."""

import json
import shutil
from itertools import product

import pytest
import yaml

from verl_precision.tools.runs import grid, page
from verl_precision.tools.runs.compare.folder import SUMMARY, command_of, comparison_folder, finished
from verl_precision.tools.runs.compare.outputs import FIGURE, Results


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipes" / "mine" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("a: 1")
    return path


@pytest.fixture
def command(recipe):
    return lambda *overrides: command_of(recipe, ["bf16", "fp16"], overrides)


BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}


def finish(folder, *runs):
    (folder / SUMMARY).write_text(json.dumps({"runs": [{**run, "seconds_total": 1.0} for run in runs]}))


@pytest.fixture
def interrupted(tmp_path, command):
    """A comparison of which one run has finished."""
    with comparison_folder(tmp_path / "out", command()) as folder:
        finish(folder, BF16)
    return folder.rename(folder.with_name("2026-01-01_00-00-00"))


def test_an_interrupted_comparison_goes_on_until_it_is_finished(tmp_path, command, interrupted):
    for _ in range(2):
        with comparison_folder(tmp_path / "out", command()) as folder:
            assert folder == interrupted and not finished(folder, command())
    finish(interrupted, BF16, FP16)
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder != interrupted


@pytest.mark.parametrize(("more", "anew", "text"), [(["a=b"], False, "a: 1"), ([], True, "a: 1"), ([], False, "a: 2")])
def test_another_command_or_recipe_and_anew_get_a_new_folder(tmp_path, recipe, command, interrupted, more, anew, text):
    recipe.write_text(text)
    with comparison_folder(tmp_path / "out", command(*more), anew=anew) as folder:
        assert folder != interrupted


def test_one_that_is_running_is_left_alone(tmp_path, command, interrupted):
    with comparison_folder(tmp_path / "out", command()) as first:
        with comparison_folder(tmp_path / "out", command()) as second:
            assert first == interrupted and second != interrupted


def test_a_grid_is_finished_when_each_arm_has_each_seed(tmp_path, recipe, command, interrupted):
    grid = command_of(recipe, ["bf16", "fp16"], [], estimators=["grpo"], seeds=[1, 2])
    assert grid != command() and json.loads(json.dumps(grid)) == grid
    with comparison_folder(tmp_path / "out", grid) as folder:
        assert folder != interrupted
        runs = [{**one, "arm": f"grpo-{one['precision']}", "seed": seed} for one in (BF16, FP16) for seed in (1, 2)]
        finish(folder, *runs[:3])
        assert not finished(folder, grid)
        finish(folder, *runs)
        assert finished(folder, grid)


def test_arms_are_part_of_the_command_and_their_overrides_of_the_digest(tmp_path, recipe):
    found = []
    for text, arms in (("arms: {x: [a=1]}", "x"), ("arms: {x: [a=2]}", "x"), ("arms: {x: [a=2]}", "y")):
        recipe.write_text(text)
        found.append(command_of(recipe, [], [], arms=[arms]))
    assert found[0]["digest"] != found[1]["digest"] == found[2]["digest"] and found[1] != found[2]
    with comparison_folder(tmp_path / "out", found[0]) as folder:
        finish(folder, {"precision": None, "arm": "x"})
        assert finished(folder, found[0])


@pytest.fixture
def results_of(root, tmp_path):
    """Add recorded runs to a comparison, as runs of the sanity test on GPUs."""

    def make(runs: list[grid.PlannedRun]) -> Results:
        results = Results(root / "recipes" / "sanity" / "sanity.yaml", runs, [], tmp_path, None)
        for run in runs:
            shutil.copytree(root / "tests" / "data" / "quickstart" / "fp16", tmp_path / run.name)
            choices = {"estimator": run.arm.estimator or "grpo", "scale": "1x8_h100"}
            path = tmp_path / run.name / "hydra" / ".hydra" / "hydra.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
            results.add(run, 60.0)
        return results

    return make


def shown(results: Results) -> tuple[list[tuple], list[tuple]]:
    runs, expected = results.in_columns(list(results.measured().values()))
    return [(run.name, run.curve, run.column) for run in runs], [(curve.name, curve.column) for curve in expected]


def test_each_estimator_has_a_column_with_its_own_curves_of_the_paper(results_of):
    arms = grid.preset_arms(["bf16", "fp16"], ["grpo", "ratio_one", "gspo"])
    runs, expected = shown(results_of(grid.with_seeds(arms, [7])))
    pairs = list(product(("grpo", "ratio_one", "gspo"), ("bf16", "fp16")))
    assert runs == [(f"{estimator}-{precision}/seed_7", precision, estimator) for estimator, precision in pairs]
    assert expected == [(f"paper: {precision}", estimator) for estimator, precision in pairs[:2] + pairs[4:]]


def test_one_estimator_has_the_plots_of_today(results_of):
    found = shown(results_of(grid.with_seeds(grid.preset_arms(["bf16", "fp16"]))))
    assert found == ([("bf16", "bf16", ""), ("fp16", "fp16", "")], [("paper: bf16", ""), ("paper: fp16", "")])


def test_arms_with_other_curves_of_the_paper_share_none(results_of, tmp_path):
    arms = [grid.Arm("a", ("estimator=grpo",), estimator=None), grid.Arm("b", (), estimator=None)]
    results = results_of(grid.with_seeds(arms))
    assert shown(results)[1] == [("paper: bf16", ""), ("paper: fp16", "")]
    path = tmp_path / "b" / "hydra" / ".hydra" / "hydra.yaml"
    path.write_text(path.read_text().replace("grpo", "ratio_one"))
    assert shown(results)[1] == []


def test_more_than_eight_arms_have_two_reports_and_one_figure(results_of, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PANELS", page.PANELS[:1])  # one is enough to see which arms are drawn
    results = results_of(grid.with_seeds([grid.Arm(f"arm{number}", ()) for number in range(9)]))
    results.draw()
    first, second = ((tmp_path / name).read_text() for name in ("report.html", "report_2.html"))
    assert "arm7" in first and "arm8" not in first and "arm8" in second and "arm7" not in second
    assert (tmp_path / FIGURE).exists() and not (tmp_path / "report_3.html").exists()
