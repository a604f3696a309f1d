"""The curves of the page: seeds as a band, colours, and the paper's curves beside a run."""

import math
from pathlib import Path

import pytest
import yaml

from verl_precision.presets import preset_names
from verl_precision.tools.runs import content
from verl_precision.tools.runs.content import recorded_content
from verl_precision.tools.runs.curves import band_of, colours_of
from verl_precision.tools.runs.read import REWARD, Run
from verl_precision.tools.runs.status import expected_of, read_expected
from verl_precision.tools.show.colours import COLOURS, PRECISIONS


def run_of(name: str) -> Run:
    return Run(name, Path(name), [{"step": 1, REWARD: 0.5}])


@pytest.mark.parametrize("names", [["fp16", "bf16"], ["fp32", "fp16"], [*"abcdef", "bf16", "x"]])
def test_a_precision_has_its_colour_in_every_figure(names):
    """That of the README's figure, which `recipes/collapse/read_doses.py` draws with `PRECISIONS`."""
    found = colours_of([run_of(name) for name in names])
    assert len(set(found.values())) == len(names) and set(found.values()) <= set(COLOURS)
    assert {name: found[name] for name in names if name in PRECISIONS}.items() <= PRECISIONS.items()


def test_a_seed_that_is_not_finite_leaves_a_gap_and_one_that_is_shorter_leaves_the_others():
    seeds = [{1: 1.0, 2: math.nan, 3: 3.0}, {1: 2.0, 2: 4.0}]
    assert band_of(seeds) == [[1, 2, 3], [1.5, pytest.approx(math.nan, nan_ok=True), 3.0], [1, 4, 3], [2, 4, 3]]
    assert band_of(seeds[1:]) == [[1, 2], [2.0, 4.0]]


RECIPES = Path(__file__).resolve().parents[3] / "recipes"
FILES = sorted(RECIPES.glob("*/expected.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_files_of_the_recipes(path):
    text = path.read_text()
    assert "arXiv 2510.26788" in text and "https://github.com/sail-sg/Precision-RL" in text, "the source is named"
    estimators = {line.split(",")[1] for line in text.splitlines()[4:]}
    assert estimators <= set(preset_names("estimator"))
    for estimator in estimators:
        curves = read_expected(path, estimator)
        assert [curve.name for curve in curves] == ["paper: bf16", "paper: fp16"]
        for curve in curves:
            steps = [row["step"] for row in curve.rows]
            assert steps == sorted(set(steps)) and all(-1 <= row[REWARD] <= 1 for row in curve.rows)
        bf16, fp16 = (curve.rows[-1][REWARD] for curve in curves)
        assert fp16 > bf16, "the finding of the paper"


def test_what_the_paper_says_in_words_is_on_the_curves():
    """Section 4.2: peaks of 73%, 82% and 95% in BF16; 99% in FP16, which figure 1 shows as 0.97 to 0.99."""
    assert FILES[-1].parent.name == "sanity"
    for estimator, expected in (("grpo", 0.73), ("grpo_token_tis", 0.82), ("grpo_seq_mis", 0.95)):
        bf16, fp16 = (max(row[REWARD] for row in curve.rows) for curve in read_expected(FILES[-1], estimator))
        assert bf16 == pytest.approx(expected, abs=0.015) and fp16 > 0.97


def test_a_run_has_those_of_its_recipe_and_estimator_and_none_of_a_tiny_model(tmp_path):
    def ran(recipe: str, estimator: str, scale: str) -> Path:
        sources = [{"path": "hydra.conf", "schema": "pkg"}, {"path": str(RECIPES / recipe), "schema": "file"}]
        runtime = {"choices": {"estimator": estimator, "scale": scale}, "config_sources": sources}
        path = tmp_path / recipe / estimator / scale / "hydra" / ".hydra" / "hydra.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump({"hydra": {"runtime": runtime, "job": {"config_name": recipe}}}))
        return path.parents[2] / "metrics.jsonl"

    assert [curve.path for curve in expected_of(ran("sanity", "grpo", "1x8_h100"))] == 2 * [FILES[-1]]
    for words in (("sanity", "grpo", "cpu"), ("sanity", "ratio_one", "1x8_h100"), ("quickstart", "grpo", "1x8_h100")):
        assert expected_of(ran(*words)) == []
    assert expected_of(tmp_path / "no such folder") == []


def test_runs_that_belong_to_other_curves_of_the_paper_share_none(monkeypatch):
    monkeypatch.setattr(content, "expected_of", lambda path: [run_of(f"paper: {path}")])
    same, other = run_of("a"), run_of("b")
    assert [curve["name"] for curve in recorded_content([same])["expected"]] == ["paper: a"]
    assert recorded_content([same, other])["expected"] == []
