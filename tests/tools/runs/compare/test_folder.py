"""The same command goes on where it was interrupted, and nothing else does."""

import json

import pytest

from verl_precision.tools.runs.compare.folder import SUMMARY, command_of, comparison_folder, finished


@pytest.fixture
def command(tmp_path):
    recipe = tmp_path / "recipes" / "mine" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("a: 1\n")
    return lambda *overrides: command_of(recipe, ["bf16", "fp16"], overrides)


def finish(folder, *precisions):
    runs = [{"precision": precision, "seconds_total": 1.0} for precision in precisions]
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
            assert folder == interrupted and not finished(folder, command())
    finish(interrupted, "bf16", "fp16")
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder != interrupted


def test_another_command_an_edited_recipe_and_anew_get_a_folder_of_their_own(tmp_path, command, interrupted):
    with comparison_folder(tmp_path / "out", command("a=b")) as folder:
        assert folder != interrupted
    with comparison_folder(tmp_path / "new", command(), anew=True) as folder:
        assert folder != interrupted
    (tmp_path / "recipes" / "mine" / "mine.yaml").write_text("a: 2\n")
    with comparison_folder(tmp_path / "edited", command()) as folder:
        assert folder != interrupted


def test_one_that_is_running_is_left_alone(tmp_path, command, interrupted):
    with comparison_folder(tmp_path / "out", command()) as first:
        with comparison_folder(tmp_path / "out", command()) as second:
            assert first == interrupted and second != interrupted


def test_a_grid_is_finished_when_each_arm_has_each_seed(tmp_path, command, interrupted):
    recipe = tmp_path / "recipes" / "mine" / "mine.yaml"
    grid = command_of(recipe, ["bf16", "fp16"], [], estimators=["grpo"], seeds=[1, 2])
    assert grid != command() and json.loads(json.dumps(grid)) == grid
    with comparison_folder(tmp_path / "out", grid) as folder:
        assert folder != interrupted
        runs = [
            {"precision": precision, "arm": f"grpo-{precision}", "seed": seed, "seconds_total": 1.0}
            for precision in ("bf16", "fp16")
            for seed in (1, 2)
        ]
        (folder / SUMMARY).write_text(json.dumps({"runs": runs[:3]}))
        assert not finished(folder, grid)
        (folder / SUMMARY).write_text(json.dumps({"runs": runs}))
        assert finished(folder, grid)


def test_arms_are_part_of_the_command_and_their_overrides_of_the_digest(tmp_path, command):
    recipe = tmp_path / "recipes" / "mine" / "mine.yaml"
    found = []
    for text, arms in (("arms: {x: [a=1]}", "x"), ("arms: {x: [a=2]}", "x"), ("arms: {x: [a=2]}", "y")):
        recipe.write_text(text)
        found.append(command_of(recipe, [], [], arms=[arms]))
    assert found[0]["digest"] != found[1]["digest"] == found[2]["digest"] and found[1] != found[2]
    with comparison_folder(tmp_path / "out", found[0]) as folder:
        (folder / SUMMARY).write_text(json.dumps({"runs": [{"precision": None, "arm": "x", "seconds_total": 1.0}]}))
        assert finished(folder, found[0])
