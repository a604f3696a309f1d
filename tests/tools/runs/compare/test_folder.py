"""Which folder a comparison has: a new one, or that of the same command which was interrupted."""

import json
from itertools import combinations

import pytest
from rubbish import FOREIGN

from verl_precision.base.errors import CheckpointStateError
from verl_precision.tools.runs.compare import grid
from verl_precision.tools.runs.compare.run import COMMAND, SUMMARY, command_of, comparison_folder


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
    with comparison_folder(tmp_path / "out", command()) as folder:
        assert folder != interrupted


@pytest.mark.parametrize(("more", "anew", "text"), [(["a=b"], False, "a: 1"), ([], True, "a: 1"), ([], False, "a: 2")])
def test_another_command_or_recipe_and_anew_get_a_new_folder(tmp_path, recipe, command, interrupted, more, anew, text):
    recipe.write_text(text)
    with comparison_folder(tmp_path / "out", command(*more), anew=anew) as folder:
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


def test_arms_and_seeds_make_another_comparison(recipe):
    plans = [
        command_of(recipe, grid.with_seeds({arm: (f"a={arm}",) for arm in arms}, seeds), [])
        for arms, seeds in (("xy", [1]), ("xy", [1, 2]), ("x", [1]))
    ]
    assert all(one != other for one, other in combinations(plans, 2))
