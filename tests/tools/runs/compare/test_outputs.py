"""What a comparison shows of its runs: where each is drawn, beside which of the paper's curves, in which report."""

import shutil

import pytest
import yaml

from verl_precision.tools.runs import grid, page
from verl_precision.tools.runs.compare.outputs import FIGURE, Results


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
    assert runs == [
        (f"{estimator}-{precision}/seed_7", precision, estimator)
        for estimator in ("grpo", "ratio_one", "gspo")
        for precision in ("bf16", "fp16")
    ]
    assert expected == [
        ("paper: bf16", "grpo"),
        ("paper: fp16", "grpo"),
        ("paper: bf16", "gspo"),
        ("paper: fp16", "gspo"),
    ]


def test_one_estimator_has_the_plots_of_today(results_of):
    runs, expected = shown(results_of(grid.with_seeds(grid.preset_arms(["bf16", "fp16"]))))
    assert runs == [("bf16", "bf16", ""), ("fp16", "fp16", "")]
    assert expected == [("paper: bf16", ""), ("paper: fp16", "")]


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
