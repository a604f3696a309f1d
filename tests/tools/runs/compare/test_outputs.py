"""Which folder a comparison has, and where it shows each run: in which plot, beside which curves, in which report."""

import json
import shutil
from itertools import product

import pytest
import yaml
from rubbish import FOREIGN

from verl_precision.base.errors import CheckpointStateError
from verl_precision.tools.runs import grid, page
from verl_precision.tools.runs.compare.folder import COMMAND, SUMMARY, UNDRAWN, command_of, comparison_folder
from verl_precision.tools.runs.compare.outputs import FIGURE, REPORT, Results


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipes" / "mine" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("a: 1")
    return path


@pytest.fixture
def command(recipe):
    return lambda *overrides: command_of(recipe, grid.with_seeds(grid.preset_arms(["bf16", "fp16"])), overrides)


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
    (interrupted / UNDRAWN).touch()  # as one has that was killed before the last run was in its report
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder == interrupted
    (interrupted / UNDRAWN).unlink()
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder != interrupted


@pytest.mark.parametrize(("more", "anew", "text"), [(["a=b"], False, "a: 1"), ([], True, "a: 1"), ([], False, "a: 2")])
def test_another_command_or_recipe_and_anew_get_a_new_folder(tmp_path, recipe, command, interrupted, more, anew, text):
    recipe.write_text(text)
    with comparison_folder(tmp_path / "out", command(*more), anew=anew) as folder:
        assert folder != interrupted


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
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


@pytest.mark.parametrize(("text", "arms", "seeds"), [
    ("a: 1", "xy", [1, 2]),
    ("a: 1", "x", [1]),
    ("arms: {x: [a=1]}", "xy", [1]),
])  # fmt: skip
def test_what_makes_a_run_another_one_makes_another_comparison(tmp_path, recipe, text, arms, seeds):
    def plan(arms, seeds):
        return command_of(recipe, grid.with_seeds([grid.Arm(name, (f"a={name}",)) for name in arms], seeds), [])

    with comparison_folder(tmp_path / "out", plan("xy", [1])) as first:
        finish(first, "x", seed=1)
    first = first.rename(first.with_name("2026-01-01_00-00-00"))
    recipe.write_text(text)
    with comparison_folder(tmp_path / "out", plan(arms, seeds)) as folder:
        assert folder != first


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
    runs, expected = results.in_columns(list(results.finished().values()))
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


def test_more_arms_than_colours_are_in_one_report_and_one_figure(results_of, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PANELS", page.PANELS[:1])  # one is enough to see which arms are drawn
    results = results_of(grid.with_seeds([grid.Arm(f"arm{number}", ()) for number in range(9)]))
    results.draw()
    text = (tmp_path / REPORT).read_text()
    assert all(f'"name":"arm{number}"' in text for number in range(9)) and (tmp_path / FIGURE).exists()
