"""Which runs a comparison has: arms from presets or from the recipe, times seeds; and what is refused before any."""

import pytest
from cases import cases

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.runs.compare import grid


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe with arms and a seed, or with another text."""

    def write(text: str = "seed: 1\narms:\n  clipped: [precision=fp32, a.b=1]\n  shadow: []\n", name: str = "mine"):
        path = tmp_path / name / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def planned(*arguments, **options):
    return [(run.name, run.overrides) for run in grid.check_arguments(*arguments, **options)]


def test_arms_of_the_recipe(recipe):
    clipped, shadow = ("clipped", ("precision=fp32", "a.b=1")), ("shadow", ())
    assert planned(recipe(), [], [], arms=["all"]) == [clipped, shadow]
    assert planned(recipe(), [], [], arms=["shadow", "clipped"]) == [shadow, clipped]
    assert planned(recipe(), [], [], arms=["shadow"], seeds=[0]) == [("shadow/seed_0", ("seed=0",))]


def test_a_preset_is_known_from_the_overrides():
    assert grid.preset_of("precision", ["a=b", "precision=bf16", "+estimator=grpo"]) == "bf16"
    assert grid.preset_of("estimator", ["a=b", "precision=bf16", "+estimator=grpo"]) == "grpo"
    assert grid.preset_of("precision", ["algorithm.precision=bf16"]) is None


@pytest.mark.parametrize(("text", "options", "setting", "value"), cases(__file__, "refused"))
def test_refused_before_anything_starts(recipe, text, options, setting, value):
    path = recipe() if text is None else recipe(text)
    with pytest.raises(ConfigurationError) as caught:
        grid.check_arguments(path, **{"precisions": ["bf16"], "overrides": [], **options})
    assert (caught.value.setting, caught.value.value) == (setting, value) and caught.value.allowed
